// Marks the exported symbols of libfurious.so: every public class and every public function that is not inline.
#pragma once

#define FURIOUS_API __attribute__((visibility("default")))
