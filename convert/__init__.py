"""rewired.convert: a Llama checkpoint in, a rewired checkpoint out, without reading a tensor."""

from .convert import Conversion, Request, convert

__all__ = ["Conversion", "Request", "convert"]
