"""``sparse_aot/__init__.pyi`` says of the compiled functions and classes what they are."""

import inspect
import types
from pathlib import Path

import pytest

import sparse_aot

STUB = Path(sparse_aot.__file__).with_name("__init__.pyi")
NAMESPACE = {}
exec(compile(STUB.read_text(), STUB, "exec"), NAMESPACE)
OBJECTS = {
    name: found for name in sparse_aot.__all__ if isinstance(found := NAMESPACE.get(name), type | types.FunctionType)
}


def public(namespace):
    return {name for name in namespace if not name.startswith("_")}


def test_the_stub_names_what_the_package_does():
    assert public(NAMESPACE) - {"Any"} == public(sparse_aot.__all__)
    assert "__version__" in NAMESPACE["__annotations__"]
    assert STUB.with_name("py.typed").exists()


@pytest.mark.parametrize("name", [name for name in OBJECTS if isinstance(OBJECTS[name], types.FunctionType)])
def test_parameters_are_those_of_the_function(name):
    def parameters(function):
        found = inspect.signature(function).parameters.values()
        return [(parameter.name, parameter.kind, parameter.default) for parameter in found]

    assert parameters(OBJECTS[name]) == parameters(getattr(sparse_aot, name))


@pytest.mark.parametrize("name", [name for name in OBJECTS if isinstance(OBJECTS[name], type)])
def test_attributes_and_bases_are_those_of_the_class(name):
    stub, real = OBJECTS[name], getattr(sparse_aot, name)
    assert stub.__bases__ == real.__bases__
    if stub.__init__ not in (object.__init__, RuntimeError.__init__):
        assert [*inspect.signature(stub.__init__).parameters] == [*inspect.signature(real.__init__).parameters]
    attributes = public(vars(real))
    if name == "CudaError":  # set by its constructor
        attributes |= public(vars(sparse_aot.CudaError(1, "")))
    assert public(vars(stub)) | public(vars(stub).get("__annotations__", {})) == attributes
