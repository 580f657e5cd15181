// Rows of small_table.cpp as tensors and caches store them, and the numbers that their bits stand for, written from the
// formats' descriptions and without the package's conversions.
#pragma once
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "flashpage/params/params.h"

namespace table {

using namespace flashpage;

#if defined(__aarch64__)
using Float16 = __fp16;
#else
using Float16 = _Float16;
#endif

// Elements, formats of K and V with scales, and latent rows: bf16, e4m3 with scales of tokens, DeepSeek's.
enum class Kind { fp32, fp16, bf16, e4m3, e5m2, nvfp4, int4_token, int8_token, e4m3_token, latent, scaled, v32, v4 };
constexpr const char* names[] = {"float32", "float16",      "bfloat16",   "float8_e4m3fn", "float8_e5m2",
                                 "nvfp4",   "int4_token",   "int8_token", "e4m3_token",    "latent",
                                 "scaled",  "deepseek_v32", "deepseek_v4"};

inline Kind kind_of(const char* name) {
  for (size_t i = 0; i < std::size(names); ++i)
    if (std::strcmp(name, names[i]) == 0) return Kind(i);
  std::printf("%s is no name of table_rows.h\n", name), std::exit(2);
}
constexpr bool is_latent(Kind kind) { return kind >= Kind::latent; }

inline u32 random_bits() {
  static u32 state = 1;
  return (state = state * 1664525u + 1013904223u) >> 8;
}
inline float random_normal() {
  float sum = -6;  // of twelve uniform numbers
  for (int k = 0; k < 12; ++k) sum += static_cast<float>(random_bits()) / (1 << 24);
  return sum;
}

inline double small_float(u32 bits, int exponent_bits, int mantissa_bits) {
  const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1), bias = (1 << (exponent_bits - 1)) - 1;
  const double mantissa = (bits & ((1 << mantissa_bits) - 1)) + (exponent ? 1 << mantissa_bits : 0);
  const double magnitude = std::ldexp(mantissa, (exponent ? exponent : 1) - bias - mantissa_bits);
  return bits >> (exponent_bits + mantissa_bits) & 1 ? -magnitude : magnitude;
}
inline u16 bf16(float value) {
  const u32 bits = std::bit_cast<u32>(value);
  return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class T>
T read(const u8* from) {
  T found;
  std::memcpy(&found, from, sizeof found);
  return found;
}
template <class T>
void write(u8* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

// How a kind stores a row.
struct Form {
  int bits;           // of a number
  int with_scale;     // the first columns, which have scales; 0: the kind has none
  int scale_columns;  // that share a scale; 0: all
  int scale_bytes;    // of a scale
  int rest;           // byte of the row at which other columns, in bf16, begin; 0: there are none
  int row = 0;        // bytes from a row to the next one, if scales are in the row or in the page
};
constexpr Form forms[] = {{32, 0, 0, 0, 0},         {16, 0, 0, 0, 0},   {16, 0, 0, 0, 0},    {8, 0, 0, 0, 0},
                          {8, 0, 0, 0, 0},          {4, 512, 16, 1, 0}, {4, 512, 0, 4, 0},   {8, 512, 0, 4, 0},
                          {8, 512, 0, 4, 0},        {16, 0, 0, 0, 0},   {8, 512, 128, 4, 0}, {8, 512, 128, 4, 528, 656},
                          {8, 448, 64, 1, 448, 576}};

// Rows in memory that is NaN where nothing was stored, or all ones where a type has no NaN.
class Rows {
 public:
  Rows(Kind kind, int columns, int count, int page = 1)
      : kind_(kind),
        columns_(columns),
        page_(page),
        count_(count),
        bytes_(size_t(count) * (row_bytes() + (kind == Kind::v4 ? 8 : 0)), 0xff),
        scales_(size_t(count) * scales_bytes(), 0xff) {}

  u8* data() { return bytes_.data(); }
  const u8* data() const { return bytes_.data(); }

  // Strides in elements, or in bytes of rows with scales.
  KvView view(int heads) const {
    return view_of(bytes_, row_bytes() / (form().with_scale ? 1 : form().bits / 8), heads);
  }
  KvView scales_view(int heads) const {
    return form().with_scale && !is_latent(kind_) ? view_of(scales_, scales_bytes(), heads) : KvView{};
  }
  // Latent rows: the columns that K alone has.
  KvView tails() const {
    KvView found = view(1);
    found.data = bytes_.data() + 512 * form().bits / 8;
    return found;
  }
  const float* scales_of_tokens() const {
    return kind_ == Kind::scaled ? reinterpret_cast<const float*>(scales_.data()) : nullptr;
  }

  void fill(int row) {
    for (int i = 0; i < scaled(); ++i)
      if (i % (form().scale_columns ? form().scale_columns : columns_) == 0) fill_scale(row, i);
    for (int i = 0; i < columns_; ++i) fill_number(row, i);
  }

  // The numbers of all rows; those that were not filled hold anything.
  std::vector<double> values() const {
    std::vector<double> found;
    found.reserve(size_t(count_) * columns_);
    for (int row = 0; row < count_; ++row)
      for (int i = 0; i < columns_; ++i) found.push_back(value(row, i));
    return found;
  }

 private:
  Kind kind_;
  int columns_, page_, count_;
  std::vector<u8> bytes_, scales_;

  const Form& form() const { return forms[int(kind_)]; }
  int scaled() const { return form().with_scale < columns_ ? form().with_scale : columns_; }
  int row_bytes() const { return form().row ? form().row : columns_ * form().bits / 8; }
  // Bytes of a row's scales that are in memory of their own.
  int scales_bytes() const {
    if (form().row || !form().with_scale) return 0;
    return (form().scale_columns ? scaled() / form().scale_columns : 1) * form().scale_bytes;
  }
  KvView view_of(const std::vector<u8>& first, i64 row, int heads) const {
    const i64 page = row * heads * page_ + (kind_ == Kind::v4 ? 8 * page_ : 0);
    return {first.data(), page, row * heads, row};
  }

  // DeepSeek V4: a page has all rows, and then eight bytes of scales a token.
  size_t at(int row) const {
    const size_t before = kind_ == Kind::v4 ? size_t(row) / page_ * page_ * 8 : 0;
    return size_t(row) * row_bytes() + before;
  }
  const u8* scale(int row, int column) const {
    const int number = form().scale_columns ? column / form().scale_columns : 0;
    if (kind_ == Kind::v32) return &bytes_[at(row) + 512 + number * 4];
    if (kind_ == Kind::v4) return &bytes_[size_t(row) / page_ * page_ * 584 + page_ * 576 + row % page_ * 8 + number];
    return &scales_[size_t(row) * scales_bytes() + number * form().scale_bytes];
  }

  // Scales have few bits, so that a number times its scale is exact in bf16.
  void fill_scale(int row, int column) {
    u8* const to = const_cast<u8*>(scale(row, column));
    const u32 bits = random_bits();
    if (kind_ == Kind::nvfp4) return write(to, u8(36 + bits % 16));  // e4m3, 0.19 to 0.69
    if (kind_ == Kind::v4) return write(to, u8(126 + bits % 3));     // 0.5, 1 or 2
    const float factor = float(8 + bits % 8) / (kind_ == Kind::int8_token ? 512 : kind_ == Kind::int4_token ? 64 : 8);
    write(to, std::bit_cast<u32>(factor) | (kind_ == Kind::int4_token ? bits >> 8 & 15 : 0));  // and a zero point
  }

  void fill_number(int row, int column) {
    u8* const from = &bytes_[at(row)];
    if (form().rest && column >= scaled())
      return write(from + form().rest + 2 * (column - scaled()), bf16(random_normal()));
    if (form().bits == 32) return write(from + 4 * column, random_normal());
    if (kind_ == Kind::fp16) return write(from + 2 * column, static_cast<Float16>(random_normal()));
    if (form().bits == 16) return write(from + 2 * column, bf16(random_normal()));
    const u32 bits = random_bits(), sign = bits >> 15 << 7 & 0x80;
    if (form().bits == 4) {
      const int shift = column % 2 * 4;
      return write(from + column / 2, u8((from[column / 2] & ~(15 << shift)) | (bits & 15) << shift));
    }
    if (kind_ == Kind::int8_token) return write(from + column, u8(bits % 255 - 127));
    // Magnitudes from 2^-4 to 4, and now and then a subnormal one.
    const u32 exponent = bits % 16 ? bits / 16 % 5 + 1 : 0, mantissa = bits >> 9;
    if (kind_ == Kind::e5m2)
      return write(from + column, u8(sign | (exponent ? exponent + 10 : 0) << 2 | (mantissa & 3)));
    write(from + column, u8(sign | (exponent ? exponent + 2 : 0) << 3 | (mantissa & 7)));
  }

  double value(int row, int column) const {
    const u8* const from = &bytes_[at(row)];
    const bool is_rest = form().rest && column >= scaled();
    if (is_rest || (form().bits == 16 && kind_ != Kind::fp16)) {
      const u8* const place = is_rest ? from + form().rest + 2 * (column - scaled()) : from + 2 * column;
      return std::bit_cast<float>(u32{read<u16>(place)} << 16);
    }
    if (form().bits == 32) return read<float>(from + 4 * column);
    if (kind_ == Kind::fp16) return read<Float16>(from + 2 * column);
    if (kind_ == Kind::e5m2) return small_float(from[column], 5, 2);
    if (column >= scaled()) return small_float(from[column], 4, 3);
    const u8* const own = scale(row, column);
    const u32 four = from[column / 2] >> column % 2 * 4 & 15;
    if (kind_ == Kind::nvfp4) return small_float(four, 2, 1) * small_float(*own, 4, 3);
    if (kind_ == Kind::v4) return small_float(from[column], 4, 3) * std::ldexp(1.0, *own - 127);
    const u32 bits = read<u32>(own);
    if (kind_ == Kind::int4_token) return (int(four) - int(bits & 15)) * double(std::bit_cast<float>(bits & ~15u));
    const double number = kind_ == Kind::int8_token ? i8(from[column]) : small_float(from[column], 4, 3);
    return number * double(std::bit_cast<float>(bits));
  }
};

}  // namespace table
