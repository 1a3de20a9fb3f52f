#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "furious/error.h"
#include "furious/presets.h"
#include "furious/version.h"
#include "tensors.h"

namespace {

namespace nb = nanobind;

nb::list preset_list() {
  nb::list list;
  for (const furious::PresetInfo& info : furious::preset_infos())
    list.append(nb::make_tuple(info.name, info.description));
  return list;
}

}  // namespace

NB_MODULE(_furious, module) {
  nb::set_leak_warnings(false);  // caches of the Python side live until the end of the process
  module.doc() = "libfurious for the Python package; its functions are for the modules of the package.";
  nb::exception<furious::Error>(module, "Error", PyExc_RuntimeError);
  furious_python::bind_tensor(module);
  furious_python::bind_mixer(module);
  furious_python::bind_model(module);
  furious_python::bind_train(module);
  module.def("version", &furious::version);
  module.def("preset_list", &preset_list, "Names and descriptions of the architectures.");
  module.def("preset_config", &furious::preset_config, nb::arg("arch"), nb::arg("size"), nb::arg("vocabulary"),
             "config.json of a model.");
  module.def("normal_config", &furious::normal_config, nb::arg("json"),
             "Another config.json that furious reads, in its own keys.");
}
