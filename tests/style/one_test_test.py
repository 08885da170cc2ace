#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of one_test.py: what it finds in small trees of its own."""

import os
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
import one_test  # noqa: E402

ADDRESSES = "constexpr uint64_t kManagedBase = 0x220000000000;\n"

# A line of a product's source, and what is said of it.
SECOND_ONES = (
    ("clock_gettime(CLOCK_MONOTONIC, &now);", "a second clock"),
    ("const auto now = std::chrono::steady_clock::now();", "a second clock"),
    ("deadline = Clock::now() + limit;", "a second clock"),
    ("srand(time(nullptr));", "a second clock"),
    ("uint64_t hash = 0xcbf29ce484222325;", "a second hash"),
    ("for (char c : text) hash = (hash ^ c) * 16777619u;", "a second hash"),
    ("return XXH3_64bits(data, size);", "a second hash"),
    ("#include <xxhash.h>", "a second hash"),
    ("return std::hash<std::string>()(name);", "a second hash"),
    ('snprintf(text, sizeof(text), "%02x", byte);', "a second hexadecimal text"),
    ('snprintf(text, sizeof(text), "0x%llx", address);', "a second hexadecimal text"),
    ('constexpr char kDigits[] = "0123456789abcdef";', "a second hexadecimal text"),
    ('std::ifstream maps("/proc/self/maps");', "a second reader of /proc/PID/maps"),
    ('std::ifstream maps(process + "/maps");', "a second reader of /proc/PID/maps"),
    ('std::ifstream in("/proc/" + std::to_string(pid) + "/stat");', "a second reader of /proc/PID/stat"),
    ('DIR* const list = opendir("/proc");', "a second search of /proc"),
    ('const ssize_t length = readlink("/proc/self/exe", path, sizeof(path));', "a second reader of links"),
    ("bool IsNumber(const std::string& text) {", "a second test for a number"),
    ('fprintf(stderr, "\\r%s\\x1b[K", bar);', "a second progress bar"),
    ("constexpr uint64_t kHere = 0x220000000000;", "has a name in proto/driverabi/job_addresses.h"),
    ("File::~File() { close(fd_); }", "File closes one in its destructor"),
    ("  ~Socket() override {\n    if (fd_ >= 0) ::close(fd_);\n  }", "Socket closes one in its destructor"),
)

# A line of a header: a function gives the text of an error in a parameter.
ERROR_TEXTS = (
    "bool Open(const std::string& path, std::string* error);",
    "int Open(std::string * problem, int flags = 0);",
    "virtual bool Close(std::string* why = nullptr) = 0;",
)

ALLOWED = (
    "absl::Status Open(const std::string& path, std::string* content);  // not: std::string* error)",
    "const std::string* error() const;",
    "  std::string* error;",
    "bool DecodeEnd(std::string_view bytes, std::string* reason);",
    "const Moment now = Now();",
    "// clock_gettime(CLOCK_MONOTONIC, &now) and 0xcbf29ce484222325",
    "int64_t time(int unit);",
    "file.close();",
    "void Close() { close(fd_); }",
    "~File() { file_.Close(); }",
    'std::ifstream in("/proc/" + std::to_string(pid) + "/status");',
    "uint64_t address = 0x2200000000001;",
    'text.find_first_not_of("0123456789abcdef")',
)


class OneTest(unittest.TestCase):
    def problems(self, path, text):
        with tempfile.TemporaryDirectory() as root:
            for name, content in ((one_test.ADDRESSES, ADDRESSES), (path, text)):
                os.makedirs(os.path.dirname(os.path.join(root, name)), exist_ok=True)
                with open(os.path.join(root, name), "w", encoding="utf-8") as f:
                    f.write(content)
            return one_test.problems(root)[1]

    def test_second_ones(self):
        for line, said in SECOND_ONES:
            with self.subTest(line):
                found = self.problems("server/a.cc", "// A file.\n" + line + "\n")
                self.assertEqual(len(found), 1, found)
                self.assertIn("server/a.cc:2: ", found[0])
                self.assertIn(said, found[0])

    def test_what_is_no_second_one(self):
        for line in ALLOWED:
            with self.subTest(line):
                self.assertEqual(self.problems("client/a.h", line + "\n"), [])

    def test_error_texts_in_headers(self):
        for line in ERROR_TEXTS:
            with self.subTest(line):
                found = self.problems("server/a.h", "// A file.\n" + line + "\n")
                self.assertEqual(len(found), 1, found)
                self.assertIn("server/a.h:2: a second error text", found[0])
                self.assertIn("return a status (proto/errors/README.md)", found[0])
                self.assertEqual(self.problems("server/a.cc", line + "\n"), [], "only headers are looked at")

    def test_the_one_place(self):
        self.assertEqual(self.problems("proto/base/clock.h", "clock_gettime(clock, &now);\n"), [])
        self.assertEqual(self.problems("proto/base/hash.cc", "#include <xxhash.h>\n"), [])
        self.assertEqual(self.problems("proto/base/unique_fd.h", "~UniqueFd() { close(fd_); }\n"), [])

    def test_programs_of_their_own_may_read_clocks(self):
        self.assertEqual(self.problems("bench/a.cu", "clock_gettime(CLOCK_MONOTONIC, &now);\n"), [])

    def test_each_exception_is_there(self):
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
        for what, pattern, allowed, _ in one_test.ONE:
            for path in allowed:
                if path.endswith("/"):
                    continue
                with open(os.path.join(root, path), encoding="utf-8") as f:
                    text = one_test.without_comments(f.read())
                self.assertTrue(pattern.search(text) or path in one_test.STAND_ALONE, f"{path} has no {what} of its own any more")

    def test_a_tree_without_sources_is_a_mistake(self):
        with tempfile.TemporaryDirectory() as root, self.assertRaises(RuntimeError):
            one_test.problems(root)


if __name__ == "__main__":
    unittest.main()
