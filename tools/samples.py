"""Write `jobs/samples/`: a few input rows for each job of the cookbook, so that every job file validates unchanged.

python -m tools.samples

The texts are fictional. Each table has the columns that its job uses, and an id that the job keeps.
"""

import json
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
