"""Host side: from a bare machine to a running stack."""
