"""rewired.convert: a Llama checkpoint in, a rewired checkpoint out, without reading a tensor unless it is refitted."""

from .convert import Conversion, convert
from .request import RefitRequest, Request

__all__ = ["Conversion", "RefitRequest", "Request", "convert"]
