"""Images of requests: decoded, scaled down and encoded by processes of their own, ahead of the window of requests.

`pool.py` sends a process (`decode.py`) each file after its length and WHOLE, or the path of a PDF with a page of it. It
receives what it is (REFUSED, ...), the length of the image or of the reason, and these.
"""

import struct

REQUEST = struct.Struct(">qQ")
WHOLE = -1  # instead of a page, from 0
REPLY = struct.Struct(">BQ")
REFUSED, IMAGE, FIRST_FRAME = range(3)  # the last: an image of several, such as an animation
