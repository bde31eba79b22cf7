"""Ways into the block store from outside. A door imports the store; nothing imports a door."""
