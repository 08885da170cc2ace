// SPDX-License-Identifier: Apache-2.0
// What a program says when it is called wrongly: one line that names the program and the mistake, and says where the
// help is. CLI11's own messages name no program, and tell of a missing argument where an option is misspelt.
//
// Thread-safe; nothing here keeps state. Not part of the client library.
#ifndef CUDA_REMOTE_PROTO_CLI_WRONG_USE_H_
#define CUDA_REMOTE_PROTO_CLI_WRONG_USE_H_

#include <CLI/CLI.hpp>
#include <cstring>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

namespace cuda_remote {

// The mistake alone, as in "unknown option --gpus".
inline std::string Mistake(const CLI::App& app, const CLI::Error& error) {
  const std::string text = error.what();
  const auto after = [&text](const std::string& begin) {
    return text.compare(0, begin.size(), begin) == 0 ? text.substr(begin.size()) : std::string();
  };
  // Unknown words, the last one first. One that looks like an option is the mistake more often than what it has
  // displaced, or than an argument that seems to be missing then.
  std::vector<std::string> unknown = app.remaining();
  const bool too_many = text.find("not expected: ") != std::string::npos;
  if (too_many) {
    std::istringstream words(text.substr(text.find("not expected: ") + strlen("not expected: ")));
    unknown.assign(std::istream_iterator<std::string>(words), {});
  }
  if ((too_many || error.get_name() == "RequiredError") && !unknown.empty()) {
    for (const std::string& word : unknown)
      if (word[0] == '-') return "unknown option " + word;
    return "unexpected argument " + unknown.back();
  }
  if (const std::string name = after("INI was not able to parse "); !name.empty())
    return "unknown option " + name + " in the configuration file";
  if (const std::string value = after("Could not convert: "); !value.empty()) return "wrong value: " + value;
  // "--pool: q unit not recognized. Allowed values: {b,e,eb,eib,...}"; those of a size are 27.
  if (const size_t at = text.find(" unit not recognized. Allowed values: {"); at != std::string::npos) {
    const size_t unit = text.rfind(' ', at - 1) + 1, first = text.find('{', at) + 1;
    const std::string units = text.substr(first, text.rfind('}') - first);
    return text.substr(0, unit) + "unknown unit \"" + text.substr(unit, at - unit) + "\"; " +
           (units.find("kib") != std::string::npos ? "a size is a number, or one with KB, MB, GB or TB, as in 16GB"
                                                   : "it is one of " + units);
  }
  if (const size_t at = text.find(" was not readable (missing?)"); at != std::string::npos)
    return "cannot read the file " + text.substr(0, at);
  return text;
}

// For CLI::App::failure_message.
inline std::string WrongUse(const CLI::App* app, const CLI::Error& error) {
  const std::string name = app->get_name().substr(app->get_name().rfind('/') + 1);
  return name + ": " + Mistake(*app, error) + " (" + name + " --help lists the options)\n";
}

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_CLI_WRONG_USE_H_
