#include "image.hpp"

#include <cstring>

namespace vitkern::cuda {
namespace {

// Offsets in the ELF-64 header and in a section's header; <elf.h> is not on every system.
constexpr size_t kHeader = 64, kMachine = 18, kSegments = 32, kSections = 40;
constexpr size_t kSegmentSize = 54, kSegmentCount = 56, kSectionSize = 58, kSectionCount = 60;
constexpr size_t kSectionHeader = 64, kType = 4, kOffset = 24, kLength = 32;
constexpr std::string_view kMagic = "\177ELF\002";  // of 64 bits
constexpr uint32_t kNoBits = 8;                     // a section that takes no room in the file

template <class T>
T read(std::string_view image, size_t at) {
  T value;
  std::memcpy(&value, image.data() + at, sizeof value);
  return value;
}

}  // namespace

std::string image_damage(std::string_view image, uint16_t machine) {
  if (image.size() < kHeader || image.substr(0, kMagic.size()) != kMagic)
    return "is no compiled kernel";
  if (read<uint16_t>(image, kMachine) != machine)
    return machine == kCuda ? "is not for an NVIDIA GPU" : "is not for an AMD GPU";
  const uint64_t size = image.size(), start = read<uint64_t>(image, kSections);
  const uint64_t count = read<uint16_t>(image, kSectionCount);
  if (read<uint16_t>(image, kSectionSize) != kSectionHeader) return "is damaged";
  if (start > size || count * kSectionHeader > size - start) return "is truncated";
  const uint64_t segments = read<uint64_t>(image, kSegments);
  const uint64_t bytes =
      uint64_t{read<uint16_t>(image, kSegmentCount)} * read<uint16_t>(image, kSegmentSize);
  if (segments > size || bytes > size - segments) return "is truncated";
  for (uint64_t i = 0; i < count; ++i) {
    const size_t header = start + i * kSectionHeader;
    if (read<uint32_t>(image, header + kType) == kNoBits) continue;
    const uint64_t offset = read<uint64_t>(image, header + kOffset);
    if (offset > size || read<uint64_t>(image, header + kLength) > size - offset)
      return "is truncated";
  }
  return "";
}

}  // namespace vitkern::cuda
