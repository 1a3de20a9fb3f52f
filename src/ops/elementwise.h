// The few operations that only move or combine numbers one by one.
#pragma once

#include "ops/tape.h"
#include "tensor/tensor.h"

namespace furious {

void fill(const Tensor& out, float value);             // out = value; rows may be strided
void copy(const Tensor& out, const Tensor& in);        // out = in; any strides, any float dtypes; i32 to i32
void add_into(const Tensor& out, const Tensor& in);    // out += in; one dtype, rows may be strided
Tensor to_dtype(const Tensor& in, DType dtype);        // a contiguous copy in another dtype
Tensor add_forward(const Tensor& a, const Tensor& b);  // a + b; one dtype and shape

// [a, b] in the last dimension; one dtype, rows may be strided.
Tensor concat_forward(const Tensor& a, const Tensor& b);
Variable concat(Tape& tape, const Variable& a, const Variable& b);

// y = a + b, the residual connection.
Variable add(Tape& tape, const Variable& a, const Variable& b);

}  // namespace furious
