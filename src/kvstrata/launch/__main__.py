"""python -m kvstrata.launch"""

from kvstrata.launch import main

raise SystemExit(main())
