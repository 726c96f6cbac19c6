"""Small pretrained models in Hugging Face's layout, written by transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from app.config import Recipe, load_recipe
from app.runs import Outcome, Run
from app.training.publication import finish_run
from app.training.run import open_run, prepare_run
from app.training.session import train
from app.training.worker import start_worker

WORDS = "good bad fine poor great awful film book the a very not was it hotel room".split()  # noqa: SIM905
POSITIVE, NEGATIVE = ("good", "fine", "great"), ("bad", "poor", "awful")
BERT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def write_tokenizer(folder: Path, max_length: int = 64, **special: str) -> int:
    """Write a tokenizer of words, padding with its second token, and return its size."""
    names = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: index for index, word in enumerate([*names, *dict.fromkeys(WORDS)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    )
    kinds = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=max_length, **kinds | {"eos_token": "[SEP]"} | special
    ).save_pretrained(folder)
    return len(vocabulary)


def write_encoder(folder: Path, labels: int | None = None, **changes: Any) -> Path:
    """Write a BERT with a head for masked tokens, or for ``labels`` classes."""
    size = write_tokenizer(folder)
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        "bert",
        vocab_size=size,
        pad_token_id=1,
        max_position_embeddings=64,
        **BERT | {"num_labels": labels or 2} | changes,
    )
    kind = AutoModelForSequenceClassification if labels else AutoModelForMaskedLM
    kind.from_config(config).save_pretrained(folder)
    return folder


def write_decoder(folder: Path, model_type: str = "llama", **changes: Any) -> Path:
    """Write a causal model."""
    size = write_tokenizer(folder)
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        model_type, vocab_size=size, max_position_embeddings=64, **BERT | {"num_key_value_heads": 4} | changes
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def write_image_model(folder: Path, **preprocessor: Any) -> Path:
    """Write a ViT for pictures of 16 x 16 pixels in 3 channels."""
    torch.manual_seed(3)
    config = ViTConfig(**BERT, image_size=16, patch_size=8, num_labels=5)
    ViTForImageClassification(config).save_pretrained(folder)
    content = {
        "do_resize": True, "size": {"height": 16, "width": 16}, "resample": 2, "do_rescale": True,
        "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4],
        "image_processor_type": "ViTImageProcessor",
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(content | preprocessor), encoding="utf-8")
    return folder


def write_opinions(file: Path, rows: int = 60) -> Path:
    """Write texts whose label is told by one word."""
    lines = []
    for row in range(rows):
        words, label = (POSITIVE, "positive") if row % 2 else (NEGATIVE, "negative")
        text = f"the {WORDS[6 + row // 2 % 2]} was {'very ' * (row % 5)}{words[row // 4 % 3]} it {'not ' * (row // 10)}"
        lines.append(json.dumps({"text": f"{text} {'a ' * (row // 6)}", "label": label}))
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def write_resnet50(folder: Path, size: int) -> Path:
    """Write a whole ResNet-50 with fresh weights, for pictures of ``size`` x ``size`` pixels."""
    torch.manual_seed(3)
    ResNetForImageClassification(ResNetConfig(num_labels=5)).save_pretrained(folder)
    content = {
        "do_normalize": True, "do_resize": True, "feature_extractor_type": "ConvNextFeatureExtractor",
        "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "resample": 3, "crop_pct": 0.875,
        "size": size,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def recipe_of(tmp_path: Path, folder: Path, *overrides: str, recipe: str = "digits") -> Recipe:
    task = ["task=text-classification", f"data.source={write_opinions(tmp_path / 'opinions.jsonl')}"]
    data = ["data.image={size: 32, channels: 3}", "data.buckets=[8, 16, 32]", "tune=null"]
    train = ["train.workers=1", "train.epochs=2", "train.global_batch_size=8", f"storage={tmp_path / 'storage'}"]
    model = ["model.factory=null", "model.args={}", f"model.pretrained={folder}"]
    return load_recipe(f"recipes/{recipe}.yaml", [*task, *data, *train, *model, *overrides])


def train_alone(run: Run) -> Outcome:
    plan, data = prepare_run(run)
    open_run(run, plan, data)
    return finish_run(run, data, train(plan, data, start_worker(run.recipe.train), run.folder))


LEARNING = ("train.optimizer.lr=0.002", "train.epochs=15", "train.early_stopping=null")
TEXTS = ["the film was good", "bad", "it was a very very poor book , was it not"]
