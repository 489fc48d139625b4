"""Continuous batching: many requests, each with its own options, over one model and one pool of KV pages."""

from .core import Engine, EngineConfig, EngineStatus, RequestHandle, RequestResult

__all__ = ["Engine", "EngineConfig", "EngineStatus", "RequestHandle", "RequestResult"]
