#include "image.hpp"

#include <cstring>

namespace vitkern::cuda {
namespace {

// Offsets in the ELF-64 header, in a section's and in a segment's; <elf.h> is not on every system.
constexpr size_t kHeader = 64, kMachine = 18, kSegments = 32, kSections = 40;
constexpr size_t kSegmentSize = 54, kSegmentCount = 56, kSectionSize = 58, kSectionCount = 60;
constexpr size_t kSectionNames = 62;  // which section holds the sections' names
constexpr size_t kSectionHeader = 64, kType = 4, kOffset = 24, kLength = 32;
constexpr size_t kSegmentHeader = 56, kSegmentOffset = 8, kSegmentLength = 32;
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
  const uint64_t size = image.size();
  const auto fits = [size](uint64_t start, uint64_t bytes) {
    return start <= size && bytes <= size - start;
  };
  const uint64_t sections = read<uint64_t>(image, kSections);
  const uint64_t segments = read<uint64_t>(image, kSegments);
  const uint64_t section_count = read<uint16_t>(image, kSectionCount);
  const uint64_t segment_count = read<uint16_t>(image, kSegmentCount);
  // Without sections, or with their names nowhere, the rest of the file would have to be believed.
  if (section_count == 0 || read<uint16_t>(image, kSectionNames) >= section_count ||
      read<uint16_t>(image, kSectionSize) != kSectionHeader ||
      (segment_count != 0 && read<uint16_t>(image, kSegmentSize) != kSegmentHeader))
    return "is damaged";
  if (!fits(sections, section_count * kSectionHeader) ||
      !fits(segments, segment_count * kSegmentHeader))
    return "is truncated";
  for (uint64_t i = 0; i < section_count; ++i) {
    const size_t header = sections + i * kSectionHeader;
    if (read<uint32_t>(image, header + kType) == kNoBits) continue;
    if (!fits(read<uint64_t>(image, header + kOffset), read<uint64_t>(image, header + kLength)))
      return "is truncated";
  }
  for (uint64_t i = 0; i < segment_count; ++i) {
    const size_t header = segments + i * kSegmentHeader;
    if (!fits(read<uint64_t>(image, header + kSegmentOffset),
              read<uint64_t>(image, header + kSegmentLength)))
      return "is truncated";
  }
  return "";
}

}  // namespace vitkern::cuda
