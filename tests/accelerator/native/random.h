// Random numbers of the simulated accelerator.
#pragma once

#include <ATen/core/Generator.h>

namespace sim {

// The default generator of the device: a seed and how much of it has been used, which the host knows at any time.
const at::Generator& default_generator(int device);
at::Generator new_generator(int device);
// The generator that one launch draws from, made of what `drawn_from` holds now, which moves on.
at::Generator generator_of_one_launch(const std::optional<at::Generator>& drawn_from, int device);

}  // namespace sim
