// SPDX-License-Identifier: Apache-2.0
// What all programs that use CLI11 have alike: --help, --version, and the message of a wrong call.
//
// CLI11's own --help prints C++ types and the checks of values ("INT:INT in [0 - 255]") and does not wrap lines. Here
// an option has one word for its value, and what else there is to say stands behind its description:
//
//     --gpu N                 the only GPU that the program sees (0 to 255)
//     --timeout SECONDS       how long to wait (default: 60; 0.001 to 86400)
//     --log-level debug|info  what to write (default: info)
//
// packaging/from_help.py reads this form. An option's type_name is the word; "N" or "NUMBER" or "TEXT" without one.
// Thread-safe; nothing here keeps state. Not part of the client library.
#ifndef CUDA_REMOTE_PROTO_CLI_HELP_H_
#define CUDA_REMOTE_PROTO_CLI_HELP_H_

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <sstream>
#include <string>
#include <utility>

#include "proto/cli/wrong_use.h"
#include "proto/frame/version.h"

namespace cuda_remote {

class HelpFormatter : public CLI::Formatter {
 public:
  // `usage`: what follows the program's name; empty: the options and the positional arguments.
  explicit HelpFormatter(std::string usage) : usage_(std::move(usage)) {}

  std::string make_usage(const CLI::App* app, std::string name) const override {
    return usage_.empty() ? CLI::Formatter::make_usage(app, std::move(name)) : "Usage: " + name + " " + usage_ + "\n";
  }

  std::string make_option(const CLI::Option* option, bool is_positional) const override {
    std::string line = "  " + Names(*option, is_positional);
    const std::string word = is_positional ? "" : ValueWord(*option);
    if (!word.empty()) line += " " + word;
    // A name that is too long for its column has a line of its own.
    line += line.size() + 2 > kTextColumn ? "\n" + std::string(kTextColumn, ' ')
                                          : std::string(kTextColumn - line.size(), ' ');
    std::istringstream words(WithRemarks(*option));
    size_t column = kTextColumn;
    for (std::string one; words >> one;) {
      if (column > kTextColumn && column + 1 + one.size() > kWidth) {
        line += "\n" + std::string(kTextColumn, ' ');
        column = kTextColumn;
      } else if (column > kTextColumn) {
        line += " ";
        ++column;
      }
      line += one;
      column += one.size();
    }
    return line + "\n";
  }

  // One empty line between two parts, and none at the end.
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override {
    std::string text = CLI::Formatter::make_help(app, std::move(name), mode);
    for (size_t at; (at = text.find("\n\n\n")) != std::string::npos;) text.erase(at, 1);
    return text.substr(0, text.find_last_not_of('\n') + 1) + "\n";
  }

 private:
  static constexpr size_t kTextColumn = 26, kWidth = 112;

  static std::string Names(const CLI::Option& option, bool is_positional) {
    const std::string names = is_positional ? option.get_name(true, false) : option.get_name(false, true);
    // A flag that turns something off is printed with the value that it sets: "--unrestricted{false}".
    return names.substr(0, names.find('{'));
  }

  // "INT", "TEXT", or what was set; behind a colon the checks of the value: "TEXT:{debug,info}".
  static std::string ValueWord(const CLI::Option& option) {
    if (option.get_type_size() == 0) return "";
    const std::string type = option.get_type_name();
    if (const size_t at = type.find(":{"); at != std::string::npos) {
      std::string choices = type.substr(at + 2, type.rfind('}') - at - 2);
      std::replace(choices.begin(), choices.end(), ',', '|');
      // Several of them can be given; the word is one that was set.
      if (option.get_items_expected_max() == 1) return choices;
    }
    const std::string word = type.substr(0, type.find(':'));
    if (word == "INT" || word == "UINT") return "N";
    return word == "FLOAT" ? "NUMBER" : word;
  }

  // The description, and in parentheses whether the option is required, its default value, range and variable.
  static std::string WithRemarks(const CLI::Option& option) {
    std::string text = option.get_description();
    bool open = !text.empty() && text.back() == ')';
    if (open) text.pop_back();
    const auto add = [&](const std::string& one) {
      text += (open ? "; " : " (") + one;
      open = true;
    };
    if (option.get_required() && !option.get_positional()) add("required");
    if (option.get_type_size() != 0 && !option.get_default_str().empty()) add("default: " + option.get_default_str());
    const std::string type = option.get_type_name();
    const size_t from = type.find(" in ["), between = type.find(" - ", from), to = type.find(']', from);
    if (from != std::string::npos && between != std::string::npos && to != std::string::npos)
      add(type.substr(from + 5, between - from - 5) + " to " + type.substr(between + 3, to - between - 3));
    if (!option.get_envname().empty()) add("or $" + option.get_envname());
    return open ? text + ")" : text;
  }

  const std::string usage_;
};

// For each program, before its options are added. The app's name is the program's. `usage`: as HelpFormatter.
inline void SetUpProgram(CLI::App* app, const std::string& usage = "") {
  app->failure_message(WrongUse);
  app->formatter(std::make_shared<HelpFormatter>(usage));
  app->set_help_flag("-h,--help", "print this text");
  app->set_version_flag("--version", VersionLine(app->get_name()), "print the version");
}

}  // namespace cuda_remote

#endif  // CUDA_REMOTE_PROTO_CLI_HELP_H_
