"""The model that the command line names: a local ``transformers`` config, on the meta device with an example (nothing is
downloaded, no weights are read), or a function of a module or file."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import operator
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from meshwright.errors import InputError, MeshwrightError

TOKENS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "WithLMHeadModel", "ForTokenClassification")
"""Ends of the names of classes whose labels are a token each."""
WANTED = frozenset({"labels", "start_positions", "return_loss"})
"""What the forward of a class is given to make a loss: one of these at least."""
IMAGE = 224
"""Pixels along the sides of an image where the config does not say: ImageNet's."""
FRAMES = 2
"""Frames of speech that an encoder's convolutions make one position of."""


def load(model: str, batch: int, sequence: int) -> tuple[Any, Any]:
    """(module, example inputs) from what the command line names."""
    if os.path.exists(model):
        return from_config(Path(model), batch, sequence)
    name, colon, attribute = model.rpartition(":")
    if not (colon and name and attribute):
        raise InputError(f"{model!r} is no file or folder and no 'module:callable'; give a transformers config, or a function "
                         "that returns (model, example_inputs)")
    try:
        build = operator.attrgetter(attribute)(_from_file(Path(name)) if name.endswith(".py") else imported(name))
    except AttributeError as error:
        raise InputError(f"cannot import {model!r}: {error}; name a function that stands in it") from error
    if not callable(build):
        raise InputError(f"{model!r} is of type {type(build).__name__}; name a function that returns (model, example_inputs)")
    try:
        inspect.signature(build).bind()
    except TypeError as error:
        raise InputError(f"{model!r} cannot be called without arguments ({error}); it must return (model, "
                         "example_inputs)") from None
    except ValueError:  # a builtin, which does not say
        pass
    with _not_ended(model):
        try:
            made = build()
        except MeshwrightError:
            raise
        except Exception as error:  # whatever a person's function runs into
            raise InputError(f"{model!r} failed{_at(error)}: {type(error).__name__}: {error}; mend it, it must return (model, "
                             "example_inputs)") from error
    if inspect.iscoroutine(made):
        made.close()
    if not isinstance(made, tuple) or len(made) != 2:
        raise InputError(f"{model!r} returned {type(made).__name__}; it must return (model, example_inputs)")
    return made


def _at(error: Exception) -> str:
    """Where an error was raised, as far as that is in a file."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


@contextmanager
def _not_ended(name: str) -> Iterator[None]:
    """Raises InputError where a person's module or function would end the process, which would look like an answer."""
    try:
        yield
    except SystemExit as error:
        said = f"{name!r} ended with sys.exit({error.code!r}); it must define, or return, a model and no more"
        raise InputError(said) from error


def _from_file(path: Path) -> ModuleType:
    """A module from its file, whose own folder it may import from. Raises InputError if there is none."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise InputError(f"there is no file {str(path)!r}; give a Python file, as in 'model.py:build'")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.absolute()))
    try:
        with _not_ended(str(path)):
            spec.loader.exec_module(module)
    except MeshwrightError:
        raise
    except Exception as error:  # whatever a person's file runs into
        raise InputError(f"cannot import {str(path)!r}: {type(error).__name__}{_at(error)}: {error}") from error
    finally:
        sys.path.remove(str(path.parent.absolute()))
    return module


def imported(name: str) -> ModuleType:
    """A module by its name, the current folder looked into first. Raises InputError if there is none."""
    sys.path.insert(0, os.getcwd())
    try:
        with _not_ended(name):
            return importlib.import_module(name)
    except MeshwrightError:
        raise
    except Exception as error:  # whatever a person's module runs into
        raise InputError(f"cannot import {name!r}: {type(error).__name__}{_at(error)}: {error}; give a module that Python "
                         f"finds (PYTHONPATH), or a file, as in 'model.py:build'") from error
    finally:
        sys.path.remove(os.getcwd())


def from_config(path: Path, batch: int, sequence: int) -> tuple[Any, dict[str, Any]]:
    """(model, inputs with labels). The class is the one that the config names, else a causal language model's. Raises
    InputError."""
    if path.suffix == ".py":
        raise InputError(f"{str(path)!r} does not say which of its functions returns (model, example_inputs); give "
                         f"'{path}:NAME'")
    config = config_of(path)
    import torch
    import transformers

    named = [name for name in getattr(config, "architectures", None) or () if hasattr(transformers, str(name))]
    if named and _class_of(config, transformers) is None:
        raise InputError(f"{path} names {', '.join(named)} under \"architectures\", which has no labels and so no loss; name a "
                         "class with a head, such as one for causal language, or give a 'module:callable' whose model makes a "
                         "loss")
    try:
        with torch.device("meta"):
            model = model_of(config, transformers)
    except Exception as error:  # whatever transformers makes of the file
        raise _no_model(path, error) from error
    return model, example_of(model, batch, sequence)


def config_of(path: Path) -> Any:
    """The config of a folder or file. Raises InputError."""
    try:
        import transformers
    except ImportError as error:
        raise InputError("planning from a config needs transformers: pip install 'meshwright[demo]'") from error
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # whatever transformers makes of the file
        raise _no_model(path, error) from error
    for part in (config, getattr(config, "decoder", None)):
        if part is not None and hasattr(part, "use_cache"):
            part.use_cache = False
    if getattr(config, "is_encoder_decoder", False):  # some token stands before the labels, and one for those left out
        for name in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, getattr(config, "pad_token_id", None) or 0)
    return config


def model_of(config: Any, transformers: Any) -> Any:
    """A model of the class that the config names, else a causal language model, on the default device."""
    cls = _class_of(config, transformers)
    return transformers.AutoModelForCausalLM.from_config(config) if cls is None else cls(config)


def _no_model(path: Path, error: Exception) -> InputError:
    why = " ".join(str(error).split())
    why = why if len(why) <= _SAID else f"{why[:_SAID].rpartition(' ')[0]} ..."
    return InputError(f"cannot build a causal language model, or the architecture that it names, from {path}: {why}; for "
                      "another kind of model name its class under \"architectures\", or give a 'module:callable'")


_SAID = 240
"""Characters of what transformers says: it may list every configuration there is."""


def _class_of(config: Any, transformers: Any) -> Any:
    """The first architecture that the config names and transformers has; None if there is none with a loss."""
    for name in getattr(config, "architectures", None) or ():
        cls = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel) and WANTED & _parameters(cls):
            return cls
    return None


def _parameters(cls: type) -> frozenset[str]:
    """What a class's forward is given, by name."""
    return frozenset(inspect.signature(cls.forward).parameters)  # type: ignore[attr-defined]


def example_of(model: Any, batch: int, sequence: int) -> dict[str, Any]:
    """What a model of transformers is called with, on the meta device. Raises InputError."""
    import torch

    name = type(model).__name__
    tokens = torch.zeros((batch, sequence), dtype=torch.int64, device="meta")
    if model.main_input_name == "input_ids" and name.endswith(TOKENS):
        return {"input_ids": tokens, "labels": torch.empty_like(tokens)}
    labels = torch.zeros((batch,), dtype=torch.int64, device="meta")
    if model.main_input_name == "input_ids" and name.endswith("ForQuestionAnswering"):
        return {"input_ids": tokens, "start_positions": labels, "end_positions": torch.empty_like(labels)}
    if model.main_input_name == "input_features" and name.endswith(TOKENS) and hasattr(model.config, "num_mel_bins"):
        frames = FRAMES * model.config.max_source_positions  # an encoder of speech takes so many, no fewer
        features = torch.zeros((batch, model.config.num_mel_bins, frames), device="meta")
        return {"input_features": features, "labels": tokens}
    if model.main_input_name == "input_ids" and name.endswith("ForSequenceClassification"):
        return {"input_ids": tokens, "labels": labels}
    writes = getattr(model.config, "is_encoder_decoder", False)
    if model.main_input_name == "pixel_values" and (writes or name.endswith("ForImageClassification")):
        images = _images(getattr(model.config, "encoder", model.config), batch)
        return {"pixel_values": images, "labels": tokens if writes else labels}
    if {"input_ids", "pixel_values", "return_loss"} <= _parameters(type(model)) and hasattr(model.config, "vision_config"):
        return {"input_ids": tokens, "pixel_values": _images(model.config.vision_config, batch), "return_loss": True}
    sound = hasattr(model.config, "num_mel_bins") and hasattr(model.config, "max_length")
    if model.main_input_name == "input_values" and sound and name.endswith("ForAudioClassification"):
        heard = torch.zeros((batch, model.config.max_length, model.config.num_mel_bins), device="meta")
        return {"input_values": heard, "labels": labels}
    wave = model.main_input_name == "input_values" and hasattr(model.config, "inputs_to_logits_ratio")
    if wave and name.endswith("ForSequenceClassification"):
        samples = sequence * model.config.inputs_to_logits_ratio  # of the wave, as many as positions are made of
        return {"input_values": torch.zeros((batch, samples), device="meta"), "labels": labels}
    raise InputError(f"what a {name} is called with is not known here (it takes {model.main_input_name}); give a "
                     "'module:callable' that returns (model, example_inputs)")


def _images(config: Any, batch: int) -> Any:
    """As many images as samples, of the size that a config of vision names."""
    import torch

    size = getattr(config, "image_size", IMAGE)
    sides = (size, size) if isinstance(size, int) else tuple(size)
    return torch.zeros((batch, getattr(config, "num_channels", 3), *sides), device="meta")
