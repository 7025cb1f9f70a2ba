from backbench.cli import main

raise SystemExit(main())
