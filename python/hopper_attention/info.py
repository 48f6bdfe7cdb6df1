"""`python -m hopper_attention.info`: what works on this machine. Ends in `ready` or one sentence with the fix; exit
status 0.

Run, not imported: the attribute `hopper_attention.info` is the function.
"""

from __future__ import annotations

from hopper_attention.report import main

if __name__ == "__main__":
    raise SystemExit(main())
