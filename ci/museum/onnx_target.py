"""Attention operators of onnxruntime and of onnx on the CPU, inside transformers' models.

``py:onnx_target:GroupQuery``: onnxruntime's ``com.microsoft.GroupQueryAttention``, which knows sliding windows.
``py:onnx_target:Attention``: onnxruntime's ``Attention`` of opset 23, which is told the mask.
``py:onnx_target:Reference``: the same operator, computed by onnx's own reference evaluator.

Everything but attention is the ``hf:`` target; scores, softmax and weighted values are the released package's own
kernel, in float32. Prompts are scored in one pass and answers decoded one token at a time, so that a row of queries
either starts at position 0 or is the last one.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from dataclasses import replace
from typing import Any

import numpy as np

from pytest_adapt.target.hf import HfTarget
from pytest_adapt.target.protocol import Deployment, Info, UnsupportedDeployment
from pytest_adapt.target.registry import TargetSettings

_FLOAT = 1  # onnx.TensorProto.FLOAT


class _Operator(HfTarget):
    """The ``hf:`` target with one operator in place of its attention function."""

    defaults = {
        "precisions": ["fp32"],
        "shape_classes": ["odd", "aligned"],
        "observables": ["taps", "logits", "score", "topk", "text"],
    }
    name = ""
    package = "onnxruntime"

    def __init__(self, settings: TargetSettings) -> None:
        super().__init__(f"attn={self.name}", settings)

    def open(self, deployment: Deployment) -> Info:
        if deployment.precision != "fp32" or any(setting for _, setting in deployment.features):
            raise UnsupportedDeployment("the operator is called in fp32, one sequence at a time")
        transformers: Any = importlib.import_module("transformers")
        masks: Any = importlib.import_module("transformers.masking_utils")
        transformers.AttentionInterface.register(self.name, self.attend)
        masks.AttentionMaskInterface.register(self.name, masks.eager_mask)
        info = super().open(deployment)
        version = importlib.metadata.version(self.package)
        return replace(info, name=f"{self.package} {self.name}", version=version, features={})

    @staticmethod
    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[Any, None]:
        """[1, heads, tokens, d] and the keys and values of all tokens, to [1, tokens, heads, d]."""
        raise NotImplementedError


class GroupQuery(_Operator):
    """``local_window_size`` is the model's sliding window: the number of keys that a query sees, its own included."""

    name = "GroupQueryAttention"

    @staticmethod
    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[Any, None]:
        import torch

        _, heads, tokens, width = query.shape
        groups, total = key.shape[1], key.shape[2]
        window = options.get("sliding_window") or -1
        session = _session(_group_query(heads, groups, int(window), float(options["scaling"])))
        past = total - tokens
        feeds = {
            "query": _flat(query),
            "key": _flat(key[:, :, past:]),
            "value": _flat(value[:, :, past:]),
            "past_key": key[:, :, :past].contiguous().numpy(),
            "past_value": value[:, :, :past].contiguous().numpy(),
            "seqlens_k": np.array([total - 1], np.int32),
            "total_sequence_length": np.array(total, np.int32),
        }
        output = session.run(["output"], feeds)[0]
        return torch.from_numpy(output).view(1, tokens, heads, width), None


class Attention(_Operator):
    """Queries of several heads share one of the keys: the mode that the operator's definition calls GQA."""

    name = "Attention-23"

    @staticmethod
    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[Any, None]:
        return _attended(_session(_attention(float(options["scaling"]))), query, key, value, mask)


class Reference(_Operator):
    """Queries of several heads share one of the keys, in onnx's executable definition."""

    name = "reference-Attention-23"
    package = "onnx"

    @staticmethod
    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[Any, None]:
        return _attended(_evaluator(_attention(float(options["scaling"]))), query, key, value, mask)


def _attended(session: Any, query: Any, key: Any, value: Any, mask: Any) -> tuple[Any, None]:
    import torch

    tokens, total = query.shape[2], key.shape[2]
    added = torch.zeros(1, 1, tokens, total) if mask is None else mask[:, :, :, :total]
    feeds = {"q": query, "k": key, "v": value, "mask": added.float()}
    output = session.run(["output"], {name: tensor.contiguous().numpy() for name, tensor in feeds.items()})[0]
    return torch.from_numpy(np.ascontiguousarray(output)).transpose(1, 2), None


def _flat(value: Any) -> np.ndarray:
    """[1, heads, tokens, d] to [1, tokens, heads x d]."""
    return np.ascontiguousarray(value.transpose(1, 2).flatten(2).numpy())


@functools.cache
def _group_query(heads: int, groups: int, window: int, scale: float) -> bytes:
    from onnx import TensorProto, helper

    names = ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length"]
    node = helper.make_node(
        "GroupQueryAttention",
        names,
        ["output", "present_key", "present_value"],
        domain="com.microsoft",
        num_heads=heads,
        kv_num_heads=groups,
        local_window_size=window,
        scale=scale,
    )
    ranks = {"query": 3, "key": 3, "value": 3, "past_key": 4, "past_value": 4}
    inputs = [helper.make_tensor_value_info(name, _FLOAT, [None] * rank) for name, rank in ranks.items()]
    inputs.append(helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, [None]))
    inputs.append(helper.make_tensor_value_info("total_sequence_length", TensorProto.INT32, []))
    outputs = [helper.make_tensor_value_info("output", _FLOAT, [None] * 3)]
    outputs += [helper.make_tensor_value_info(name, _FLOAT, [None] * 4) for name in node.output[1:]]
    return _model(node, inputs, outputs, "com.microsoft", 1)


@functools.cache
def _attention(scale: float) -> bytes:
    from onnx import helper

    node = helper.make_node("Attention", ["q", "k", "v", "mask"], ["output"], scale=scale)
    inputs = [helper.make_tensor_value_info(name, _FLOAT, [None] * 4) for name in node.input]
    outputs = [helper.make_tensor_value_info("output", _FLOAT, [None] * 4)]
    return _model(node, inputs, outputs, "", 23)


def _model(node: Any, inputs: list[Any], outputs: list[Any], domain: str, version: int) -> bytes:
    """A model of one node. Its opset is the node's alone: a release refuses opsets newer than itself."""
    from onnx import helper

    graph = helper.make_graph([node], "one", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(domain, version)], ir_version=10)
    return bytes(model.SerializeToString())


@functools.cache
def _session(model: bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@functools.cache
def _evaluator(model: bytes) -> Any:
    import onnx
    from onnx.reference import ReferenceEvaluator

    return ReferenceEvaluator(onnx.load_from_string(model))
