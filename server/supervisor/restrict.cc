// SPDX-License-Identifier: Apache-2.0
#include "server/supervisor/restrict.h"

#include <dirent.h>
#include <errno.h>
#include <grp.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/seccomp.h>
#include <pwd.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <iterator>

#include "proto/errors/absl_status.h"

namespace cuda_remote::server {
namespace {

#if defined(__x86_64__)
constexpr uint32_t kArchitecture = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
constexpr uint32_t kArchitecture = AUDIT_ARCH_AARCH64;
#else
#error "which architecture is this for seccomp?"
#endif

// The newest call that we have looked at (mseal).
constexpr uint32_t kNewestCall = 462;
constexpr unsigned kMostCapabilities = 64;
constexpr char kModprobe[] = "/usr/bin/nvidia-modprobe";

constexpr uint32_t kForbidden[] = {
    // Other processes.
    __NR_ptrace,
    __NR_process_vm_readv,
    __NR_process_vm_writev,
    __NR_kcmp,
    438 /* pidfd_getfd */,
    424 /* pidfd_send_signal */,
    440 /* process_madvise */,
    __NR_rt_sigqueueinfo,
    __NR_tkill,
    // File systems.
    __NR_mount,
    __NR_umount2,
    __NR_pivot_root,
    __NR_chroot,
    428 /* open_tree */,
    429 /* move_mount */,
    430 /* fsopen */,
    431 /* fsconfig */,
    432 /* fsmount */,
    433 /* fspick */,
    442 /* mount_setattr */,
    __NR_name_to_handle_at,
    __NR_open_by_handle_at,
    __NR_quotactl,
    443 /* quotactl_fd */,
    __NR_mknodat,
    __NR_fanotify_init,
    __NR_swapon,
    __NR_swapoff,
    __NR_acct,
    // Namespaces.
    __NR_unshare,
    __NR_setns,
    // The kernel itself.
    __NR_init_module,
    __NR_finit_module,
    __NR_delete_module,
    __NR_kexec_load,
    __NR_kexec_file_load,
    __NR_bpf,
    __NR_perf_event_open,
    __NR_reboot,
    __NR_syslog,
    __NR_userfaultfd,
    425 /* io_uring_setup */,
    426 /* io_uring_enter */,
    427 /* io_uring_register */,
    // Keys.
    __NR_add_key,
    __NR_request_key,
    __NR_keyctl,
    // The machine's name and time.
    __NR_sethostname,
    __NR_setdomainname,
    __NR_settimeofday,
    __NR_clock_settime,
    __NR_clock_adjtime,
    __NR_adjtimex,
    __NR_vhangup,
#if defined(__x86_64__)
    __NR_kexec_load,
    __NR_iopl,
    __NR_ioperm,
    __NR_modify_ldt,
    __NR_mknod,
    __NR_uselib,
    __NR_ustat,
    __NR_sysfs,
    __NR__sysctl,
    __NR_create_module,
    __NR_lookup_dcookie,
#endif
};

constexpr uint32_t kNewNamespaces = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER |
                                    CLONE_NEWPID | CLONE_NEWNET | 0x00000080 /* CLONE_NEWTIME */;

constexpr uint32_t kAllow = SECCOMP_RET_ALLOW;
constexpr uint32_t Fails(int error) { return SECCOMP_RET_ERRNO | uint32_t(error); }

class Program {
 public:
  void Load(size_t offset) { Add(BPF_LD | BPF_W | BPF_ABS, 0, 0, uint32_t(offset)); }
  // Argument `index`, its lower or upper half.
  void LoadArgument(unsigned index, bool upper = false) {
    Load(offsetof(seccomp_data, args) + index * 8 + (upper ? 4 : 0));
  }
  void Return(uint32_t what) { Add(BPF_RET | BPF_K, 0, 0, what); }
  void ReturnIfEqual(uint32_t value, uint32_t what) {
    Add(BPF_JMP | BPF_JEQ | BPF_K, 0, 1, value);
    Return(what);
  }
  void ReturnIfMore(uint32_t value, uint32_t what) {
    Add(BPF_JMP | BPF_JGT | BPF_K, 0, 1, value);
    Return(what);
  }
  // What `inner` adds is for this call only; it must end with Return. The accumulator has the call's number before it.
  template <typename Inner>
  void ForCall(uint32_t call, Inner inner) {
    const size_t jump = code_.size();
    Add(BPF_JMP | BPF_JEQ | BPF_K, 0, 0, call);
    inner();
    code_[jump].jf = uint8_t(code_.size() - jump - 1);
  }
  void Add(uint16_t code, uint8_t jt, uint8_t jf, uint32_t k) { code_.push_back({code, jt, jf, k}); }
  std::vector<sock_filter> Take() { return std::move(code_); }

 private:
  std::vector<sock_filter> code_;
};

// Where GiveUp puts the number of the process: it is not known before.
constexpr uint32_t kOwnProcess = 0x7fff5e1f;

int Call(long result) { return result < 0 ? errno : 0; }

int SetCapabilities(uint64_t kept) {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2] = {};
  for (int half = 0; half < 2; ++half) data[half].effective = data[half].permitted = uint32_t(kept >> (32 * half));
  return Call(syscall(SYS_capset, &header, data));
}

uint64_t PermittedCapabilities() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2] = {};
  if (syscall(SYS_capget, &header, data) != 0) return 0;
  return data[0].permitted | uint64_t(data[1].permitted) << 32;
}

}  // namespace

absl::StatusOr<Account> FindAccount(const std::string& name) {
  const bool number = !name.empty() && name.size() < 10 && name.find_first_not_of("0123456789") == std::string::npos;
  const passwd* const user = number ? getpwuid(uid_t(std::stoul(name))) : getpwnam(name.c_str());
  if (!user && !number) return absl::NotFoundError("there is no user " + name + " on this machine");
  Account account;
  account.name = user ? user->pw_name : name;
  account.uid = user ? user->pw_uid : uid_t(std::stoul(name));
  account.gid = user ? user->pw_gid : gid_t(account.uid);
  // Device files are often a group's.
  int count = 64;
  account.groups.resize(size_t(count));
  if (user && getgrouplist(user->pw_name, user->pw_gid, account.groups.data(), &count) < 0) count = 64;
  account.groups.resize(user ? size_t(count) : 0);
  return account;
}

std::vector<sock_filter> ForbiddenCalls(bool network) {
  Program program;
  program.Load(offsetof(seccomp_data, arch));
  program.Add(BPF_JMP | BPF_JEQ | BPF_K, 1, 0, kArchitecture);
  program.Return(SECCOMP_RET_KILL_PROCESS);
  program.Load(offsetof(seccomp_data, nr));
  // Future ones, and those of the x32 convention. clone3 has its arguments in memory, where they cannot be looked at;
  // the C library then takes clone.
  program.ReturnIfMore(kNewestCall, Fails(ENOSYS));
  program.ReturnIfEqual(435 /* clone3 */, Fails(ENOSYS));
  for (const uint32_t call : kForbidden) program.ReturnIfEqual(call, Fails(EPERM));
  program.ForCall(__NR_clone, [&] {
    program.LoadArgument(0);
    program.Add(BPF_JMP | BPF_JSET | BPF_K, 0, 1, kNewNamespaces);
    program.Return(Fails(EPERM));
    program.Return(kAllow);
  });
  program.ForCall(__NR_socket, [&] {
    program.LoadArgument(0);
    program.ReturnIfEqual(AF_UNIX, kAllow);
    if (network) {
      for (const int family : {AF_INET, AF_INET6, AF_NETLINK}) program.ReturnIfEqual(uint32_t(family), kAllow);
    }
    program.Return(Fails(EAFNOSUPPORT));
  });
  program.ForCall(__NR_ioctl, [&] {
    // Typing into the terminal that the server was started from.
    program.LoadArgument(1);
    program.ReturnIfEqual(TIOCSTI, Fails(EPERM));
    program.ReturnIfEqual(TIOCLINUX, Fails(EPERM));
    program.Return(kAllow);
  });
  if (!network) {
    for (const uint32_t call : {uint32_t(__NR_kill), uint32_t(__NR_tgkill), uint32_t(__NR_rt_tgsigqueueinfo)}) {
      program.ForCall(call, [&] {
        program.LoadArgument(0);
        program.ReturnIfEqual(kOwnProcess, kAllow);
        program.Return(Fails(EPERM));
      });
    }
    program.ForCall(__NR_prlimit64, [&] {
      program.LoadArgument(0);
      program.ReturnIfEqual(0, kAllow);
      program.ReturnIfEqual(kOwnProcess, kAllow);
      program.Return(Fails(EPERM));
    });
  }
  program.Return(kAllow);
  return program.Take();
}

int GiveUp(const Restrictions& restrictions, const char** what) {
  int failure;
  if (restrictions.drop_capabilities) {
    *what = "drop capabilities from the bounding set";
    const bool may = PermittedCapabilities() >> CAP_SETPCAP & 1;
    for (unsigned capability = 0; may && capability < kMostCapabilities; ++capability) {
      if (prctl(PR_CAPBSET_READ, capability, 0, 0, 0) != 1) continue;
      if ((failure = Call(prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)))) return failure;
    }
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
  }
  if (restrictions.account) {
    const Account& account = *restrictions.account;
    *what = "become the user of foreign sessions";
    if ((failure = Call(syscall(SYS_setgroups, account.groups.size(), account.groups.data())))) return failure;
    if ((failure = Call(syscall(SYS_setresgid, account.gid, account.gid, account.gid)))) return failure;
    if ((failure = Call(syscall(SYS_setresuid, account.uid, account.uid, account.uid)))) return failure;
    // The change of user has cleared it.
    const pid_t parent = getppid();
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (getppid() != parent) return ESRCH;
  }
  if (restrictions.drop_capabilities) {
    *what = "give up capabilities";
    if ((failure = SetCapabilities(0))) return failure;
  }
  *what = "set no_new_privs";
  if ((failure = Call(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)))) return failure;
  if (restrictions.calls.empty()) return 0;
  *what = "forbid system calls (seccomp)";
  const auto own = uint32_t(getpid());
  constexpr size_t kMostInstructions = 256;
  sock_filter code[kMostInstructions];
  const size_t count = restrictions.calls.size();
  if (count > kMostInstructions) return E2BIG;
  for (size_t i = 0; i < count; ++i) {
    code[i] = restrictions.calls[i];
    if (code[i].code == (BPF_JMP | BPF_JEQ | BPF_K) && code[i].k == kOwnProcess) code[i].k = own;
  }
  const sock_fprog program{(unsigned short)(count), code};
  return Call(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program));
}

absl::Status RestrictServer() {
  // To start workers as another user without capabilities, to end them, and to listen at ports below 1024.
  constexpr unsigned kKept[] = {CAP_SETUID, CAP_SETGID, CAP_SETPCAP, CAP_KILL, CAP_NET_BIND_SERVICE};
  uint64_t kept = 0;
  for (const unsigned capability : kKept) kept |= uint64_t{1} << capability;
  const uint64_t permitted = PermittedCapabilities();
  const auto fail = [&](const char* what, int failure) { return ErrnoStatus(std::string("cannot ") + what, failure); };
  for (unsigned capability = 0; capability < kMostCapabilities; ++capability) {
    if ((kept >> capability & 1) || !(permitted >> CAP_SETPCAP & 1)) continue;
    if (prctl(PR_CAPBSET_READ, capability, 0, 0, 0) == 1) prctl(PR_CAPBSET_DROP, capability, 0, 0, 0);
  }
  prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
  if (const int failure = SetCapabilities(permitted & kept)) return fail("give up capabilities", failure);
  Restrictions restrictions;
  restrictions.drop_capabilities = false;
  restrictions.calls = ForbiddenCalls(/*network=*/true);
  const char* what;
  if (const int failure = GiveUp(restrictions, &what)) return fail(what, failure);
  return absl::OkStatus();
}

void MakeDeviceFiles() {
  if (access(kModprobe, X_OK) != 0) return;
  if (access("/dev/nvidiactl", F_OK) == 0 && access("/dev/nvidia-uvm", F_OK) == 0) return;
  std::vector<std::string> words = {kModprobe, "-u"};
  unsigned gpus = 0;
  if (DIR* const list = opendir("/proc/driver/nvidia/gpus")) {
    while (const dirent* const entry = readdir(list)) gpus += entry->d_name[0] != '.';
    closedir(list);
  }
  for (unsigned gpu = 0; gpu < gpus; ++gpu) words.push_back("-c=" + std::to_string(gpu));
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(&word[0]);
  arguments.push_back(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    execv(kModprobe, arguments.data());
    _exit(127);
  }
  if (pid > 0) waitpid(pid, nullptr, 0);
}

}  // namespace cuda_remote::server
