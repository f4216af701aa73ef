"""Small pictures, and processors built without a download from the embedded model's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_qwen import tiny_tokenizer

TURNS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}PICTURE{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(extra: list[str], **named: str) -> Any:
    """Return the embedded model's tokenizer with further special tokens; `named` ones become its attributes."""
    from transformers import PreTrainedTokenizerFast

    made = tiny_tokenizer()
    made.add_tokens([*extra, *named.values()], special_tokens=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=made.backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=named,
    )


def qwen2_5_vl(folder: Path) -> Any:
    """Write a Qwen2.5-VL with tiny random weights and its processor to `folder`; return the model."""
    from transformers import AutoConfig, Qwen2_5_VLProcessor, Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    words = tokenizer(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"])
    template = TURNS.replace("PICTURE", "<|vision_start|><|image_pad|><|vision_end|>")
    sizes = {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
    processor = Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(size=sizes), words, Qwen2VLVideoProcessor(), chat_template=template
    )
    config = AutoConfig.for_model("qwen2_5_vl")
    ids = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    ids |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    return _save(folder, processor, config, {name: words.convert_tokens_to_ids(word) for name, word in ids.items()})


def gemma3(folder: Path) -> Any:
    """Write a multimodal Gemma 3 with tiny random weights and its processor, which returns `token_type_ids`; return the model."""
    from transformers import AutoConfig, Gemma3ImageProcessor, Gemma3Processor

    words = tokenizer([], boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>")
    pictures = Gemma3ImageProcessor(size={"height": 64, "width": 64})
    processor = Gemma3Processor(
        pictures, words, chat_template=TURNS.replace("PICTURE", "<start_of_image>"), image_seq_length=4
    )
    ids = {"image_token_id": "<image_soft_token>", "boi_token_id": "<start_of_image>", "eoi_token_id": "<end_of_image>"}
    ids = {name: words.convert_tokens_to_ids(word) for name, word in ids.items()}
    ids |= {"image_token_index": ids["image_token_id"], "boi_token_index": ids["boi_token_id"]}
    return _save(folder, processor, AutoConfig.for_model("gemma3"), ids | {"eoi_token_index": ids["eoi_token_id"]})


def _save(folder: Path, processor: Any, config: Any, ids: dict[str, int]) -> Any:
    from kit.model_check.tiny import tiny_config, tiny_model

    for name, value in ids.items():
        if hasattr(config, name):
            setattr(config, name, value)
    small = tiny_config(config, 512)
    for part in (small, small.get_text_config()):
        part.eos_token_id, part.pad_token_id = processor.tokenizer.eos_token_id, processor.tokenizer.pad_token_id
        part.bos_token_id = None
    model = tiny_model(small)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model


def picture(shade: int, width: int = 28, height: int = 28) -> Any:
    """Return an RGB picture of one colour, except for a white pixel in a corner."""
    from PIL import Image

    made = Image.new("RGB", (width, height), (shade, 255 - shade, 128))
    made.putpixel((0, 0), (255, 255, 255))
    return made


def rows(folder: Path, count: int = 24) -> Path:
    """Write pictures, and a JSONL file of questions about them; return the path of the file."""
    (folder / "pictures").mkdir(parents=True)
    lines = []
    for number in range(count):
        name, dark = f"pictures/{number}.png", number % 2 == 0
        picture(10 * number if dark else 255 - number, 28 + 28 * (number % 2)).save(folder / name)
        lines.append({"prompt": "Dark or light?", "image": name, "answer": "dark" if dark else "light"})
    path = folder / "pictures.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
