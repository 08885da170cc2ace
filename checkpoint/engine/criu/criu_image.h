// SPDX-License-Identifier: Apache-2.0
// Reading CRIU's own image files, as far as the tools must: they say better than CRIU what hinders a restore, and look
// whether what was saved is what should have been.
#ifndef CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_CRIU_IMAGE_H_
#define CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_CRIU_IMAGE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <protozero/pbf_reader.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace cuda_remote::checkpoint {

// The kinds of open files that are read, by their numbers in CRIU (FdTypes in its images/fdinfo.proto).
enum class FileKind : uint32_t { kRegular = 1, kInternetSocket = 4, kUnixSocket = 5, kNetlinkSocket = 13, kTimer = 17 };

// The bytes of one of those files. False if there is none.
bool ReadImageFile(const std::string& path, std::string* bytes);

// Writes one of those files anew.
absl::Status WriteImageFile(const std::string& path, const std::string& bytes);

// Calls `use` with each entry of one of those files that begin with CRIU's common magic number and `magic`. False if
// `image` is not such a file, or `use` has thrown what protozero throws. Any input is safe.
bool ReadEntries(std::string_view image, uint32_t magic, const std::function<void(protozero::pbf_reader)>& use);

// The numbers of a field, packed or not. Throws what protozero throws.
std::vector<uint64_t> NumbersIn(protozero::pbf_reader* field);

// Calls `entry` with the message of each open file of this kind in CRIU's files.img: RegFileEntry, InetSkEntry and so
// on. False if `image` is not such a file, or `entry` has thrown what protozero throws. Any input is safe.
bool ReadFilesImage(std::string_view image, FileKind kind, const std::function<void(protozero::pbf_reader)>& entry);

// Calls `entry` with the TcpStreamEntry of CRIU's tcp-stream-*.img, as above.
bool ReadStreamImage(std::string_view image, const std::function<void(protozero::pbf_reader)>& entry);

// Calls `entry` with the numbers of two entries of files.img, for each open file that had lost its name and was given
// another one by CRIU's dump: the file, and that name. From CRIU's remap-fpath.img, as above.
bool ReadLinks(std::string_view image, const std::function<void(uint32_t file, uint32_t link)>& entry);

// Likewise, for each deleted file, whose contents CRIU has saved: its number in files.img, and that of
// ghost-file-*.img.
bool ReadGhosts(std::string_view image, const std::function<void(uint32_t file, uint32_t ghost)>& entry);

// The numbers in files.img of what a process has open, by descriptor: from CRIU's fdinfo-*.img, as above.
bool ReadDescriptors(std::string_view image, std::map<int, uint32_t>* files);

// The number of the fdinfo-*.img that belongs to a process: from CRIU's ids-*.img, as above.
bool ReadDescriptorTable(std::string_view image, uint32_t* table);

// Calls `entry` for each message in CRIU's sk-queues.img: with the number in files.img of the socket in whose queue it
// is, and the numbers of the files in it (SCM_RIGHTS). As above.
bool ReadMessages(std::string_view image,
                  const std::function<void(uint32_t socket, const std::vector<uint64_t>& files)>& entry);

// Makes the messages in CRIU's sk-queues.img whose contents are `mark` messages without contents. False if `image` is
// not such a file. Any input is safe.
bool EmptyMessages(std::string* image, std::string_view mark);

// Likewise, for each of those, and for the folders in /proc of processes that have ended: all files that a restore does
// not look for under their names.
bool ReadNameless(std::string_view image, const std::function<void(uint32_t file)>& entry);

// What an open plain file in CRIU's files.img is to be instead.
struct FileChange {
  std::string path;       // empty: stays
  uint32_t mode = 0;      // as in st_mode; 0: stays
  bool other = false;     // another file: CRIU is not to expect the old one's size and mode
  uint64_t position = 0;  // where the other file goes on
};
// Changes those files for which `change` returns true. False if `image` is not such a file. Any input is safe.
bool ChangeFiles(std::string* image, const std::function<bool(std::string_view path, FileChange* change)>& change);

// Makes each terminal in CRIU's tty-info.img one of no session: the job's terminal is given to it by its init, and CRIU
// looks in vain for the session's leader. False if `image` is not such a file.
bool LetGoOfTerminals(std::string* image);

// Has a process in CRIU's core-*.img that was stopped by a signal run when it is restored. False if `image` is not such
// a file. Any input is safe.
bool LetRun(std::string* image);

// CRIU saves of a timer how long it still runs. A timer that has run out while its process stood still has no time
// left, and CRIU restores one without time left as a timer that is off. Has the periodic ones in CRIU's files.img
// (timerfd) run out again at once instead, from where they go on. CRIU counts the time left of an absolute timer from
// the last full second, so that it would run out up to a second early, and bring all periods of that second at once:
// has it count from the present. False if `image` is not such a file. Any input is safe.
bool KeepTimersOn(std::string* image);

// Likewise the process's timer of real time (setitimer) in CRIU's core-*.img: the kernel starts that one again when the
// process gets its signal.
bool KeepAlarmOn(std::string* image);

}  // namespace cuda_remote::checkpoint

#endif  // CUDA_REMOTE_CHECKPOINT_ENGINE_CRIU_CRIU_IMAGE_H_
