// The part of the DLPack C exchange API (version 1) that the host library uses. It is declared here so that the library
// builds without torch; tests/host/test_host_layout.py compares it with torch's own header if torch is installed.
#pragma once
#include <cstdint>

namespace flashpage::dlpack {

inline constexpr uint32_t major_version = 1;
inline constexpr int32_t cpu = 1;
inline constexpr uint8_t signed_integer = 0;

struct Tensor {
  void* data;
  struct {
    int32_t type, index;
  } device;
  int32_t dims;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct ExchangeApi {
  struct {
    uint32_t major, minor;
    void* previous;
  } header;
  void* unused[3];
  int (*tensor_from_python)(void* object, Tensor* tensor);  // borrowed; -1: a Python error is set
  // Not used: in a program without CUDA, the table's current stream is null.
  int (*current_stream)(int32_t device_type, int32_t device_index, void** stream);
};

}  // namespace flashpage::dlpack
