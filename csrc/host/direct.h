// What the module takes from direct.cpp.
#pragma once
#include <pybind11/pybind11.h>

namespace specdec::host {

void bind_direct(pybind11::module_& module);

}  // namespace specdec::host
