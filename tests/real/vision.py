"""Compare a vision server with itself: rows through a job, and the same images in requests of our own.

    python -m tests.real.vision make FOLDER            write a small random Qwen2-VL
    vllm serve FOLDER --port 8899 --dtype float32 --max-model-len 4096 --enforce-eager
    python -m tests.real.vision compare FOLDER http://localhost:8899/v1

The job sends one request at a time, so that batches change no token. It also prints how many prompts have the tokens of
the model's formula.
"""

import base64
import io
import json
import random
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from PIL import Image

from pipeline.config import load_job
from pipeline.endpoint.images.decode import Pages, converted
from pipeline.endpoint.images.pool import size_of
from pipeline.job.running.run import run_job
from pipeline.model.image_tokens import image_tokens
from tests.endpoint.odd_images import GOOD
from tests.model_folders import write_tokenizer
from tests.pdfs import pdf

CONTROL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if 'text' in p %}{{ p.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PREPROCESSOR = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 501_760}
MAX_PIXELS = 600_000


def make(folder: Path) -> None:
    import torch
    from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, *CONTROL)
    ids = dict(zip(CONTROL, AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(list(CONTROL))))
    config = Qwen2VLConfig(
        vocab_size=272, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=ids["<|im_end|>"], tie_word_embeddings=False,
        rope_scaling={"type": "mrope", "mrope_section": [4, 6, 6]},
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
        vision_config={"depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 4, "mlp_ratio": 2},
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(config).float()
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.3)
    model.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for name, kind in (("", "Image"), ("video_", "Video")):
        key = "image_processor_type" if kind == "Image" else "video_processor_type"
        values = PREPROCESSOR | {"processor_class": "Qwen2VLProcessor", key: f"Qwen2VL{kind}Processor"}
        (folder / f"{name}preprocessor_config.json").write_text(json.dumps(values))


def compare(model: Path, url: str) -> None:
    draw, formula = random.Random(0), image_tokens(model)
    raws = [GOOD[kind](0) for kind in GOOD if kind != "wide"] + [_photo(draw) for _ in range(24)]
    with TemporaryDirectory() as name:
        folder = Path(name)
        texts = [f"{i}: what is it?" for i in range(len(raws))]
        pq.write_table(pa.table({"text": texts, "image": raws}), folder / "in.parquet")
        (folder / "docs").mkdir()
        (folder / "docs" / "a.pdf").write_bytes(pdf(range(8)))
        server = {"server": {"base_url": url}, "engine": {"max_num_seqs": 1}}
        images = {"images": {"format": "png", "max_pixels": MAX_PIXELS}, "sampling": {"max_tokens": 8}}
        prompt = {"template": "{text}", "images": ["image"]}
        rows = _run(
            folder / "images", {**server, **images, "input": {"path": f"{folder}/in.parquet"}, "prompt": prompt}
        )
        by_text = {row["text"]: (row["generated_text"], row["num_input_tokens"]) for row in rows}
        sent = [converted(raw, MAX_PIXELS, "png", 90) for raw in raws]
        answers = [_direct(url, image, text) for image, text in zip(sent, texts)]
        same = sum(by_text[text] == answer for text, answer in zip(texts, answers))
        print(f"{same} of {len(raws)} images: the same text and number of prompt tokens")
        assert formula is not None
        more = [
            tokens - formula.num_more(*size_of(image)) - len(t) for image, t, (_, tokens) in zip(sent, texts, answers)
        ]
        print(f"{more.count(more[0])} of {len(raws)} images: the tokens of the formula, and {more[0]} of the template")
        source = {"path": f"{folder}/docs", "format": "pdf"}
        prompt = {"template": "page?", "images": ["page"]}
        rows = _run(folder / "pages", {**server, **images, "input": source, "prompt": prompt})
        pages = [Pages(MAX_PIXELS, "png", 90, 150).image(f"{folder}/docs/a.pdf", row["source_row"]) for row in rows]
        answers = [_direct(url, page, "page?") for page in pages]
        same = sum((row["generated_text"], row["num_input_tokens"]) == each for row, each in zip(rows, answers))
        print(f"{same} of {len(rows)} pages: the same text and number of prompt tokens")


def _run(folder: Path, job: Mapping[str, Any]) -> list[dict[str, Any]]:
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump({**job, "output": {"path": str(folder)}}))
    run_job(load_job(path))
    return pq.read_table(folder).to_pylist()


def _direct(url: str, image: bytes, text: str) -> tuple[str, int]:
    picture = {"url": "data:image/png;base64," + base64.b64encode(image).decode()}
    parts = [{"type": "image_url", "image_url": picture}, {"type": "text", "text": text}]
    with urllib.request.urlopen(f"{url}/models") as found:
        name = json.load(found)["data"][0]["id"]
    body = {"model": name, "messages": [{"role": "user", "content": parts}], "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as found:
        answer = json.load(found)
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]


def _photo(draw: random.Random) -> bytes:
    out = io.BytesIO()
    Image.effect_noise((draw.randint(40, 1500), draw.randint(40, 1500)), 80).convert("RGB").save(out, "JPEG")
    return out.getvalue()


if __name__ == "__main__":
    {"make": make, "compare": compare}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
