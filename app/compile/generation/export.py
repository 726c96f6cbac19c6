"""The export of a causal language model of transformers as a stateful OpenVINO graph with a key-value cache."""

import io
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import torch
from openvino import opset13
from openvino._offline_transformations import apply_make_stateful_transformation
from torch import Tensor, nn

from app.compile.generation.architectures import CacheShape, require_exportable
from app.errors import CompileError, first_line
from app.repository.manifest import GENERATION_FILE

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""The tokenizer files in Hugging Face's layout that a version keeps."""

CONFIG_FILES = ("config.json", "generation_config.json")

_INPUTS = ("input_ids", "attention_mask", "position_ids", "beam_idx")
_EXAMPLE_BATCH, _EXAMPLE_PAST, _EXAMPLE_TOKENS = 2, 3, 4


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the logs, progress bars and warnings of the libraries that export a model."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)


@quiet()
def load_causal_lm(folder: Path) -> Any:
    """Return the model of a folder of transformers, in float32 and evaluation mode. Raises CompileError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config = config.get_text_config()
        require_exportable(config)
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            attn_implementation="sdpa",
            dtype=torch.float32,
            # Other weights are pickles, which run code when they are read.
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except CompileError:
        raise
    except Exception as error:  # the library raises any error for a damaged folder
        raise CompileError(
            f"{str(folder)!r} cannot be read as a language model of transformers ({first_line(error)}): write it with "
            "save_pretrained"
        ).of("generation.unreadable") from error
    # transformers would fill them with random numbers.
    if missing := [*loading["missing_keys"], *map(str, loading["mismatched_keys"])]:
        raise CompileError(
            f"{str(folder)!r} lacks weights of the model: {missing[0]}, one of {len(missing)}; write it again with "
            "save_pretrained"
        ).of("generation.unreadable")
    # transformers would drop them, and so change the trained model.
    if left_out := sorted(loading["unexpected_keys"]):
        raise CompileError(
            f"{str(folder)!r} has weights that a {config.model_type} of this configuration does not have: "
            f"{left_out[0]}, one of {len(left_out)}; correct config.json, or write it again with save_pretrained"
        ).of("generation.unreadable")
    return model.eval()


def export_model(model: Any, folder: Path) -> None:
    """Write the graph and the weights of a model of transformers, in float32.

    Raises:
        CompileError: the architecture is not supported, a weight is not finite, or OpenVINO cannot convert it.
    """
    require_exportable(model.config)
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise CompileError(
                f"the weight {name} has numbers that are not finite: train the model again, or restore its weights"
            ).of("generation.not_finite")
    folder.mkdir(parents=True, exist_ok=True)
    openvino.save_model(_graph_of(model), folder / GENERATION_FILE, compress_to_fp16=False)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the configuration and the tokenizer of a folder of transformers, and write the tokenizer for OpenVINO.

    Raises:
        CompileError: the folder has no tokenizer, or OpenVINO cannot convert it.
    """
    copy_files(source, folder)
    _write_engine_tokenizer(source, folder)


def copy_files(source: Path, folder: Path) -> None:
    """Copy the configuration and the tokenizer of a folder of transformers. Raises CompileError if it has none."""
    if not (source / TOKENIZER_FILES[0]).exists():
        raise CompileError(
            f"{str(source)!r} has no tokenizer: expected {TOKENIZER_FILES[0]}; write it with save_pretrained of the "
            "model's tokenizer"
        ).of("generation.no_tokenizer")
    for name in (*CONFIG_FILES, *TOKENIZER_FILES):
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


@quiet()
def _write_engine_tokenizer(source: Path, folder: Path) -> None:
    """Write the tokenizer that the engine follows grammars with. Rayloom encodes the prompts itself."""
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        encoder, decoder = convert_tokenizer(tokenizer, with_detokenizer=True)
    except Exception as error:  # both libraries raise arbitrary errors for an unknown tokenizer
        raise CompileError(
            f"the tokenizer in {str(source)!r} cannot be converted for the engine ({first_line(error)}): give a "
            "model whose tokenizer.json has byte pairs, word pieces or unigrams"
        ).of("generation.tokenizer") from error
    openvino.save_model(encoder, folder / "openvino_tokenizer.xml")
    openvino.save_model(decoder, folder / "openvino_detokenizer.xml")


class _Step(nn.Module):
    """One call of a model, with new tokens and the keys and values of earlier ones."""

    def __init__(self, model: nn.Module, layers: int) -> None:
        super().__init__()
        self.m, self._layers = model, layers

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, beam_idx: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the logits of the new tokens, and the keys and values of each layer.

        Args:
            input_ids, position_ids: int64 of shape (batch, new tokens).
            attention_mask: int64 of shape (batch, all tokens).
            beam_idx: int32 of shape (batch,), the row of ``past`` that each row continues.
            past: alternating keys and values, float32 of shape (batch, heads, earlier tokens, width).
        """
        cache = _cache_of([tensor.index_select(0, beam_idx) for tensor in past])
        total, new = attention_mask.shape[1], input_ids.shape[1]
        is_before = torch.arange(total)[None, :] <= (total - new + torch.arange(new))[:, None]
        seen = is_before[None, None] & attention_mask.bool()[:, None, None, :]
        output = self.m(
            input_ids=input_ids,
            # Given a mask of four dimensions, transformers derives none from the example's lengths.
            attention_mask=torch.where(seen, 0.0, float("-inf")).float(),
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        return (output.logits, *(tensor for layer in cache.layers for tensor in (layer.keys, layer.values)))


def _cache_of(tensors: list[Tensor]) -> Any:
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache: Any = DynamicCache()
    cache.layers, cache.layer_class_to_replicate = [], None
    for keys, values in zip(tensors[::2], tensors[1::2], strict=True):
        layer: Any = DynamicLayer()
        layer.keys, layer.values = keys, values
        layer.is_initialized, layer.dtype, layer.device = True, torch.float32, torch.device("cpu")
        cache.layers.append(layer)
    return cache


def _converter() -> Any:
    """Return OpenVINO's converter. ``app.engines`` prevents its import with the library."""
    if sys.modules.get("openvino.tools.ovc", openvino) is None:
        del sys.modules["openvino.tools.ovc"]
    from openvino.tools.ovc import convert_model

    return convert_model


@quiet()
def _graph_of(model: Any) -> openvino.Model:
    """Return the graph, with its cache as state. Raises CompileError if OpenVINO cannot convert the model."""
    shape = CacheShape.of(model.config)
    try:
        with torch.no_grad():
            example = _example(shape)
            traced = torch.jit.trace(_Step(model, shape.layers), example, strict=False, check_trace=False)  # type: ignore[no-untyped-call]
            graph = _converter()(traced, example_input=example)
    except Exception as error:  # a model's own code may raise anything
        raise CompileError(f"the {model.config.model_type} cannot be exported to OpenVINO: {first_line(error)}").of(
            "generation.export"
        ) from error
    return _stateful(graph, shape)


def _example(shape: CacheShape) -> tuple[Tensor, ...]:
    past = (_EXAMPLE_BATCH, shape.heads, _EXAMPLE_PAST, shape.width)
    return (
        torch.zeros(_EXAMPLE_BATCH, _EXAMPLE_TOKENS, dtype=torch.long),
        torch.ones(_EXAMPLE_BATCH, _EXAMPLE_PAST + _EXAMPLE_TOKENS, dtype=torch.long),
        torch.arange(_EXAMPLE_PAST, _EXAMPLE_PAST + _EXAMPLE_TOKENS).repeat(_EXAMPLE_BATCH, 1),
        torch.arange(_EXAMPLE_BATCH, dtype=torch.int32),
        *(torch.zeros(past) for _ in range(2 * shape.layers)),
    )


def _stateful(graph: openvino.Model, shape: CacheShape) -> openvino.Model:
    """Name the inputs and outputs, and make the cache a state of the graph that starts empty."""
    parts = [f"{layer}.{part}" for layer in range(shape.layers) for part in ("key", "value")]
    past, present = [f"past_key_values.{part}" for part in parts], [f"present.{part}" for part in parts]
    shapes = [[-1, -1]] * 3 + [[-1]] + [[-1, shape.heads, -1, shape.width]] * len(past)
    for port, name, sizes in zip(graph.inputs, [*_INPUTS, *past], shapes, strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_friendly_name(name)
        port.get_node().set_partial_shape(openvino.PartialShape(sizes))
    for port, name in zip(graph.outputs, ["logits", *present], strict=True):
        port.get_tensor().set_names({name})
    for operation in graph.get_ops():  # the engine finds the matrices of adapters by these names
        operation.set_friendly_name(operation.get_friendly_name().replace("__module.m.", "__module."))
    graph.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(graph, dict(zip(past, present, strict=True)))
    _empty_state(graph, shape)
    graph.validate_nodes_and_infer_types()
    return graph


def _empty_state(graph: openvino.Model, shape: CacheShape) -> None:
    """Initialize the cache with no tokens, for as many rows as the input has."""
    sizes = opset13.shape_of(graph.input("input_ids"), output_type="i64")
    batch = opset13.gather(sizes, opset13.constant([0]), opset13.constant(0))
    rest = [opset13.constant(np.array([size], np.int64)) for size in (shape.heads, 0, shape.width)]
    for operation in graph.get_ops():
        if operation.get_type_name() == "ReadValue":
            zero = opset13.constant(0.0, dtype=operation.get_output_element_type(0))
            operation.set_arguments([opset13.broadcast(zero, opset13.concat([batch, *rest], axis=0))])
