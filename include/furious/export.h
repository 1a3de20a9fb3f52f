// Marks what libfurious.so offers to other programs: every public class and every public function that is not inline.
#pragma once

#define FURIOUS_API __attribute__((visibility("default")))
