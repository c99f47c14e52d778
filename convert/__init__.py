"""rewired.convert: a checkpoint in, a rewired checkpoint out, without reading a tensor unless it is refitted."""

from rewired.refit.request import RefitRequest

from .convert import Conversion, convert
from .request import Request

__all__ = ["Conversion", "RefitRequest", "Request", "convert"]
