// What a cubin (an ELF file) says about its kernels: architecture, parameters, block size,
// registers. The format is NVIDIA's own and undocumented; the numbers are those that cuobjdump -elf
// prints.
#pragma once
#include <elf.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace cubin {

struct Parameter {
  int offset = -1, size = 0;
};

struct Function {
  std::string name;
  std::vector<Parameter> parameters;
  int threads = 0;    // that a block must have; 0 leaves it open
  int cluster = 1;    // blocks that must start together
  int registers = 0;  // of each thread
  int shared = 0;     // bytes that the kernel takes besides what the launch gives it
};

struct Image {
  int arch = 0;        // 80
  bool exact = false;  // runs on no other architecture
  size_t size = 0;
  std::map<std::string, Function> functions;
};

template <class T>
T read(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// Calls visit(attribute, value's bytes, their number) for each record of a section .nv.info*.
template <class Visit>
void each_record(const uint8_t* at, size_t size, Visit visit) {
  constexpr int kSized = 4;  // the other formats hold their value in two bytes of the record
  const uint8_t* const end = at + size;
  while (at + 4 <= end) {
    const int format = at[0], attribute = at[1];
    const size_t length = format == kSized ? read<uint16_t>(at + 2) : 0;
    if (at + 4 + length > end) return;
    if (format == kSized) visit(attribute, at + 4, length);
    at += 4 + length;
  }
}

inline void read_function(const uint8_t* at, size_t size, Function& f) {
  constexpr int kParameter = 0x17, kThreads = 0x10, kCluster = 0x3d;
  each_record(at, size, [&](int attribute, const uint8_t* value, size_t length) {
    if (attribute == kParameter && length >= 12) {
      const auto place = read<uint32_t>(value + 4), shape = read<uint32_t>(value + 8);
      const size_t ordinal = place & 0xffff;
      f.parameters.resize(std::max(f.parameters.size(), ordinal + 1));
      f.parameters[ordinal] = {static_cast<int>(place >> 16), static_cast<int>(shape >> 18)};
    } else if ((attribute == kThreads || attribute == kCluster) && length >= 12) {
      const uint32_t product =
          read<uint32_t>(value) * read<uint32_t>(value + 4) * read<uint32_t>(value + 8);
      (attribute == kThreads ? f.threads : f.cluster) = static_cast<int>(product);
    }
  });
}

// Returns what is wrong, or nothing.
inline std::string parse(const uint8_t* p, Image& image) {
  constexpr int kCuda = 190, kRegisters = 0x2f;
  const auto header = read<Elf64_Ehdr>(p);
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_machine != kCuda)
    return "not a CUDA binary";
  // From ABI version 8 on (compilers of CUDA 13) the architecture is in the second byte of the
  // flags, and the mark of an architecture-specific binary is not always set: from sm_90 on it is
  // taken as set, as Triton compiles only such.
  const bool old = header.e_ident[EI_ABIVERSION] < 8;
  image.arch = old ? header.e_flags & 0xff : header.e_flags >> 8 & 0xff;
  image.exact = old ? (header.e_flags & 0x800) != 0 : image.arch >= 90;

  std::vector<Elf64_Shdr> sections(header.e_shnum);
  for (size_t i = 0; i < sections.size(); ++i)
    sections[i] = read<Elf64_Shdr>(p + header.e_shoff + i * header.e_shentsize);
  const auto name = [&](const Elf64_Shdr& s) {
    return std::string(reinterpret_cast<const char*>(p) + sections[header.e_shstrndx].sh_offset +
                       s.sh_name);
  };
  const auto after = [](const std::string& text, const std::string& start) {
    return text.compare(0, start.size(), start) == 0 ? text.substr(start.size()) : "";
  };
  image.size = std::max(header.e_shoff + sections.size() * header.e_shentsize,
                        header.e_phoff + size_t{header.e_phnum} * header.e_phentsize);
  std::vector<std::string> symbols;
  for (const Elf64_Shdr& s : sections) {
    if (s.sh_type != SHT_NOBITS) image.size = std::max<size_t>(image.size, s.sh_offset + s.sh_size);
    const std::string kernel = after(name(s), ".text.");
    if (!kernel.empty()) image.functions[kernel].name = kernel;
    if (s.sh_type == SHT_SYMTAB)
      for (size_t at = 0; at + sizeof(Elf64_Sym) <= s.sh_size; at += sizeof(Elf64_Sym))
        symbols.emplace_back(reinterpret_cast<const char*>(p) + sections[s.sh_link].sh_offset +
                             read<Elf64_Sym>(p + s.sh_offset + at).st_name);
  }
  for (const Elf64_Shdr& s : sections) {
    if (name(s) == ".nv.info")
      each_record(p + s.sh_offset, s.sh_size, [&](int attribute, const uint8_t* value, size_t n) {
        if (attribute != kRegisters || n < 8) return;
        const auto symbol = read<uint32_t>(value);
        const auto f = image.functions.find(symbol < symbols.size() ? symbols[symbol] : "");
        if (f != image.functions.end())
          f->second.registers = static_cast<int>(read<uint32_t>(value + 4));
      });
    const auto info = image.functions.find(after(name(s), ".nv.info."));
    if (info != image.functions.end()) read_function(p + s.sh_offset, s.sh_size, info->second);
    const auto memory = image.functions.find(after(name(s), ".nv.shared."));
    if (memory != image.functions.end()) memory->second.shared = static_cast<int>(s.sh_size);
  }
  return "";
}

}  // namespace cubin
