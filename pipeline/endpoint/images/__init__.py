"""Images of requests: decoded, scaled down and encoded by processes of their own, ahead of the window of requests.

`pool.py` sends a process (`decode.py`) each file after its length, and receives whether it is an image, the length of
the image or of the reason, and these.
"""

import struct

LENGTH = struct.Struct(">Q")
REPLY = struct.Struct(">?Q")
