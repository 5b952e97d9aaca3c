"""Write `jobs/samples/`: a few input rows for each job of the cookbook, so that every job file validates unchanged.

python -m tools.samples

The texts are fictional. Each table has the columns that its job uses, and an id that the job keeps.
"""

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.demo.reports import make_report

FOLDER = Path(__file__).parents[1] / "jobs" / "samples"

TICKETS = [
    ("T-1001", "Charged twice", "I was charged twice for March. Please refund one of the payments."),
    ("T-1002", "App closes", "The app closes as soon as I open the camera. Version 4.2, Android 15."),
    ("T-1003", "Export", "Can I export my invoices as one file for the whole year?"),
    ("T-1004", "Thank you", "Your colleague Mira was very patient with me. Thank you!"),
]

DOCUMENTS = [
    ("D-1", "invoice_number, total, due_date", "Invoice 4711 of 3 March. Total 218.40 EUR, due on 2 April.", 48),
    ("D-2", "name, email, company", "Best regards, Jonas Weber, Nordlicht GmbH, jonas@nordlicht.example", 48),
    ("D-3", "flight, from, to, date", "Your flight XZ 218 from Oslo to Porto leaves on 9 May at 07:40.", 64),
]

ARTICLES = [
    ("A-1", "Tides", "The moon pulls the sea towards it. Twice a day the water rises, and twice it falls."),
    ("A-2", "Bread", "Flour, water, salt and time are enough. The dough rests for a night and is baked hot."),
    ("A-3", "Bridges", "An arch carries a load by pressing stones together, so it needs no mortar to stand."),
]

ANSWERS = [
    ("Q-1", "How many days has a leap year?", "A leap year has 366 days.", "Usually 365, sometimes more."),
    ("Q-2", "What boils at a lower temperature, water or ethanol?", "Water does.", "Ethanol, at about 78 C."),
    ("Q-3", "Name a prime number above 20.", "21 is a prime number.", "23 is a prime number."),
]

TOPICS = [
    ("S-1", "a parcel that arrived damaged", "angry", 160),
    ("S-2", "a forgotten password", "polite", 120),
    ("S-3", "a subscription that renewed itself", "confused", 160),
]

CHATS = [
    ("C-1", [{"role": "user", "content": "Which of your plans has an API?"}]),
    (
        "C-2",
        [
            {"role": "user", "content": "My sync is stuck."},
            {"role": "assistant", "content": "Which version do you use?"},
            {"role": "user", "content": "4.2, since yesterday."},
        ],
    ),
]

GRADED = [
    (
        f"{question_id}-{answer_id}",
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
    )
    for question_id, question, *answers in ANSWERS
    for answer_id, answer in zip("ab", answers)
]

MESSAGES = [
    ("M-1", "Hi, this is Ada Brook. Call me on 555 0100 or write to ada@example.org."),
    ("M-2", "The parcel for Tom Reed, 4 Mill Lane, never arrived."),
    ("M-3", "Thanks, all works now."),
]

PAGES = [
    ("https://example.org/tides", "The moon and the sun both raise tides. At new moon their pulls add up."),
    ("https://example.org/sale", "BEST PRICES!!! click here click here limited offer shoes shoes shoes"),
    ("https://example.org/login", "Home | Log in | Register | Cookies | Back to top"),
]

SHAPES = [
    ("F-1", lambda x, y: x * x + y * y < 400, (200, 40, 40)),  # a red circle
    ("F-2", lambda x, y: max(abs(x), abs(y)) < 16, (40, 80, 200)),  # a blue square
    ("F-3", lambda x, y: -16 < y < 16 and 2 * abs(x) < y + 16, (40, 140, 60)),  # a green triangle
]

SCAN = [
    ["Invoice 4711", "", "2 boxes of paper     18.40 EUR", "1 printer           200.00 EUR", "", "Total  218.40 EUR"],
    ["Terms", "", "Payment is due within 30 days.", "Goods remain ours until they are paid."],
]

STYLES = [
    (report.report_id, report.text, style)
    for report, style in zip((make_report("job", index) for index in range(6)), ("short", "invoice", None) * 2)
]

SYSTEM = "Answer with one word: billing, bug, question or other."
REQUESTS = [
    {
        "custom_id": ticket,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "gpt-4.1-mini",
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{subject}\n\n{body}"}],
            "max_tokens": 4,
            "temperature": 0,
        },
    }
    for ticket, subject, body in TICKETS
]


def _table(rows: list[tuple], **columns: pa.DataType) -> pa.Table:
    values = zip(*rows, strict=True)
    return pa.table(
        {name: pa.array(column, kind) for (name, kind), column in zip(columns.items(), values, strict=True)}
    )


def _png(is_inside: Callable[[int, int], bool], colour: tuple[int, int, int], size: int = 48) -> bytes:
    """Return a picture of a shape on white."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    half, white = size // 2, (255, 255, 255)
    lines = [[colour if is_inside(x - half, y - half) else white for x in range(size)] for y in range(size)]
    pixels = b"".join(b"\0" + bytes(part for pixel in line for part in pixel) for line in lines)
    head = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    stored = zlib.compress(pixels, 0)  # the same with each version of zlib
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", stored) + chunk(b"IEND", b"")


def scan() -> bytes:
    """Return `scan.pdf`, a document with a page of text for each entry of SCAN."""
    font = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", "", font]
    for lines in SCAN:
        text = "BT /F1 14 Tf 18 TL 72 760 Td " + " ".join(f"({line}) Tj T*" for line in lines) + " ET"
        objects.append(f"<< /Length {len(text)} >>\nstream\n{text}\nendstream")
        page = "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Resources << /Font << /F1 3 0 R >> >>"
        objects.append(f"{page} /Contents {len(objects)} 0 R >>")
    pages = " ".join(f"{2 * i + 5} 0 R" for i in range(len(SCAN)))
    objects[1] = f"<< /Type /Pages /Kids [{pages}] /Count {len(SCAN)} >>"
    out, offsets = "%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{each}\nendobj\n"
    table = "".join(f"{offset:010d} 00000 n \n" for offset in offsets)
    end = f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(out)}\n%%EOF\n"
    return f"{out}xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{end}".encode()


TEXT = pa.string()
TURNS = pa.list_(pa.struct({"role": TEXT, "content": TEXT}))


def samples() -> dict[str, pa.Table]:
    """Return every table by file name."""
    return {
        "tickets": _table(TICKETS, ticket_id=TEXT, subject=TEXT, body=TEXT),
        "documents": _table(DOCUMENTS, doc_id=TEXT, fields=TEXT, text=TEXT, budget=pa.int32()),
        "articles": _table(ARTICLES, article_id=TEXT, title=TEXT, text=TEXT),
        "answers": _table(ANSWERS, question_id=TEXT, question=TEXT, answer_a=TEXT, answer_b=TEXT),
        "topics": _table(TOPICS, topic_id=TEXT, topic=TEXT, mood=TEXT, budget=pa.int32()),
        "chats": _table(CHATS, chat_id=TEXT, turns=TURNS),
        "graded": _table(GRADED, answer_id=TEXT, turns=TURNS),
        "messages": _table(MESSAGES, message_id=TEXT, text=TEXT),
        "pages": _table(PAGES, url=TEXT, text=TEXT),
        "photos": _table(
            [(photo_id, _png(is_inside, colour)) for photo_id, is_inside, colour in SHAPES],
            photo_id=TEXT,
            image=pa.binary(),
        ),
        "styles": _table(STYLES, report_id=TEXT, report=TEXT, style=TEXT),
    }


def requests() -> str:
    """Return the text of `requests.jsonl`, a file for OpenAI's Batch API."""
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in REQUESTS)


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, table in samples().items():
        pq.write_table(table, FOLDER / f"{name}.parquet", compression="zstd")
    (FOLDER / "requests.jsonl").write_text(requests(), encoding="utf-8")
    (FOLDER / "scan.pdf").write_bytes(scan())
