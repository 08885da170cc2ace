// SPDX-License-Identifier: Apache-2.0
// What cr-sbatch submits, and how a job starts.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>

#include "programs/slurm/job_start.h"
#include "programs/slurm/options.h"
#include "programs/slurm/part_plan.h"
#include "programs/slurm/step.h"
#include "programs/slurm/submission.h"

namespace cuda_remote::client::slurm {
namespace {

using Words = std::vector<std::string>;

TEST(SubmissionTest, DividesTheWords) {
  const Submission found =
      Divide({"--checkpoint-interval", "10m", "-J", "name", "-n4", "--exclusive", "-H", "--time=10", "--gres", "gpu:1",
              "--checkpoint-keep=3", "-o", "out", "job.sh", "--steps", "5", "-x"});
  EXPECT_EQ(found.own, (Words{"--checkpoint-interval", "10m", "--checkpoint-keep=3"}));
  EXPECT_EQ(found.options,
            (Words{"-J", "name", "-n4", "--exclusive", "-H", "--time=10", "--gres", "gpu:1", "-o", "out"}));
  EXPECT_EQ(found.script, "job.sh");
  EXPECT_EQ(found.arguments, (Words{"--steps", "5", "-x"}));
  EXPECT_FALSE(found.has_wrap);
}

TEST(SubmissionTest, GuessesOnlyForUnknownOptions) {
  for (const char* unknown : {"--no-such-option", "-y"}) {
    const Submission found = Divide({"-n", "1", unknown, "job.sh"});
    EXPECT_EQ(found.script, "");
    EXPECT_EQ(found.unknown, unknown);
    EXPECT_EQ(found.guessed, "job.sh");
    EXPECT_EQ(found.options, (Words{"-n", "1", unknown, "job.sh"}));
    // A flag of a plugin, and an option with a value.
    EXPECT_EQ(Divide({unknown, "-n", "1", "job.sh"}).script, "job.sh");
    EXPECT_EQ(Divide({unknown, "--", "job.sh"}).script, "job.sh");
    EXPECT_EQ(Divide({unknown, "7", "job.sh"}).script, "job.sh");
  }
  EXPECT_EQ(Divide({"--container-image=x", "job.sh"}).script, "job.sh");
  for (const Words& known :
       {Words{"--time", "1"}, Words{"-p", "debug"}, Words{"--hold"}, Words{"--checkpoint-keep", "3"}}) {
    const Submission found = Divide(known);
    EXPECT_EQ(found.guessed, "") << known[0];
    EXPECT_EQ(found.script, "");
  }
}

TEST(SubmissionTest, FindsTheCommandOfWrap) {
  for (const Words& words : {Words{"--wrap", "a b", "-n", "1"}, Words{"-n", "1", "--wrap=a b"}}) {
    const Submission found = Divide(words);
    EXPECT_TRUE(found.has_wrap);
    EXPECT_EQ(found.wrapped, "a b");
    EXPECT_EQ(found.options, (Words{"-n", "1"}));
    EXPECT_EQ(found.script, "");
  }
  EXPECT_EQ(Divide({"-n", "1"}).script, "");
  EXPECT_EQ(Divide({"--wait", "--", "-script"}).script, "-script");
}

TEST(SubmissionTest, KeepsTheComponentsOfAHeterogeneousJob) {
  const Submission found = Divide({"-n", "1", ":", "--gres=gpu:1", "--checkpoint-keep=3", "job.sh", ":"});
  EXPECT_EQ(found.options, (Words{"-n", "1", ":", "--gres=gpu:1"}));
  EXPECT_EQ(found.own, (Words{"--checkpoint-keep=3"}));
  EXPECT_EQ(found.script, "job.sh");
  EXPECT_EQ(found.arguments, (Words{":"}));
  int line = 0;
  const std::string script =
      MakeBatchScript("#!/bin/sh\n#SBATCH -n 1\n#SBATCH hetjob\n#SBATCH --gres=gpu:1\ntrue\n", "", {"run"}, &line);
  EXPECT_NE(script.find("#SBATCH -n 1\n#SBATCH hetjob\n#SBATCH --gres=gpu:1\n# The"), std::string::npos);
}

TEST(SubmissionTest, KeepsTheLinesForSbatchAndTheScript) {
  const std::string text =
      "#!/usr/bin/python3\n#SBATCH --time=10\n# more\n\n#SBATCH -n 1\nprint(1)\n#SBATCH --not-read\nprint(2)\n";
  int line = 0;
  const std::string script = MakeBatchScript(text, "it's", {"/bin/run", "--dir=a\nb c"}, &line);
  EXPECT_EQ(script.substr(0, script.find("exec")),
            "#!/bin/sh\n#SBATCH --job-name='it'\\''s'\n#SBATCH --time=10\n#SBATCH -n 1\n"
            "# The script below runs under cr-run, so that it can be saved and restarted.\n");
  EXPECT_NE(script.find("exec '/bin/run' '--dir=a\nb c' --script-line=" + std::to_string(line) + " -- \"$0\" \"$@\"\n"),
            std::string::npos);
  EXPECT_EQ(FromLine(script, line), text);
  EXPECT_EQ(FromLine(text, 1), text);
  EXPECT_EQ(FromLine(text, 100), "");
}

TEST(SubmissionTest, FindsOwnOptionsInTheScript) {
  const std::string text =
      "#!/bin/sh\n#SBATCH --time=10 --checkpoint-interval 10m -n 1 # a comment\n#SBATCH --checkpoint-keep=3\n"
      "#SBATCH -J 'a b'\ntrue\n#SBATCH --checkpoint-dir=/late\n";
  EXPECT_EQ(OwnWordsOf(text), (Words{"--checkpoint-interval", "10m", "--checkpoint-keep=3"}));
  int line = 0;
  const std::string script = MakeBatchScript(text, "", {"run"}, &line);
  EXPECT_EQ(script.substr(0, script.find("# The")), "#!/bin/sh\n#SBATCH --time=10 -n 1\n#SBATCH -J 'a b'\n");
  EXPECT_EQ(FromLine(script, line), text);
}

TEST(OptionsTest, GoThroughAnotherCommandLine) {
  CheckpointOptions options, again;
  CLI::App app, other;
  AddCheckpointOptions(&app, &options);
  AddCheckpointOptions(&other, &again);
  Words words = {"--checkpoint-dir=/a b", "--checkpoint-interval=2m",  "--checkpoint-on=timeout",
                 "--checkpoint-keep=4",   "--checkpoint-output=/o-%j", "--checkpoint-error=/e",
                 "--checkpoint-cut=/c",   "--checkpoint-cut=/d",       "--checkpoint-addresses=10.9.0.1-10.9.0.9@e"};
  app.parse(Words(words.rbegin(), words.rend()));
  words = ToWords(options);
  other.parse(Words(words.rbegin(), words.rend()));
  EXPECT_EQ(again.directory, "/a b");
  EXPECT_EQ(again.interval, 120);
  EXPECT_TRUE(again.On("timeout"));
  EXPECT_FALSE(again.On("preempt"));
  EXPECT_EQ(again.keep, 4);
  EXPECT_EQ(again.output, "/o-%j");
  EXPECT_EQ(again.error, "/e");
  EXPECT_EQ(again.cut, (Words{"/c", "/d"}));
  EXPECT_EQ(again.addresses, "10.9.0.1-10.9.0.9@e");
  EXPECT_TRUE(CheckpointOptions().On("preempt"));
  CLI::App wrong;
  AddCheckpointOptions(&wrong, &options);
  EXPECT_THROW(wrong.parse(Words{"--checkpoint-on=never"}), CLI::ParseError);
}

TEST(StepTest, ReadsTheOptionsOfSrun) {
  const absl::StatusOr<Step> step = ParseStep(
      {"-n", "3", "--mpi=pmix_v4", "-c2", "-uQ", "--exact", "-J", "x", "--kill-on-bad-exit=1", "prog", "-n", "9"}, {},
      1);
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(step->tasks, std::vector<int>{3});
  EXPECT_EQ(step->mpi, Mpi::kPmix);
  EXPECT_EQ(step->cpus, 2);
  EXPECT_EQ(step->command, (Words{"prog", "-n", "9"}));
  for (const Words& words :
       {Words{"--gres=gpu:1", "prog"}, Words{"-o", "file", "prog"}, Words{"-n", "0", "prog"}, Words{"-N", "2", "prog"},
        Words{"--mpi=openmpi", "prog"}, Words{"--export=NONE", "prog"}, Words{"-n", "1"}, Words{"-n"}, Words{}}) {
    EXPECT_FALSE(ParseStep(words, {}, 1).ok()) << words.size();
  }
  const std::string error(ParseStep({"--gres=gpu:1", "prog"}, {}, 1).status().message());
  EXPECT_NE(error.find("option --gres of srun"), std::string::npos) << error;
}

TEST(StepTest, DistributesTheTasks) {
  const auto tasks = [](const Words& words, const Variables& variables, int nodes) {
    Words all = words;
    all.push_back("prog");
    const absl::StatusOr<Step> step = ParseStep(all, variables, nodes);
    return step.ok() ? step->tasks : std::vector<int>();
  };
  using Counts = std::vector<int>;
  EXPECT_EQ(tasks({}, {}, 1), Counts{1});
  EXPECT_EQ(tasks({}, {}, 3), (Counts{1, 1, 1}));
  EXPECT_EQ(tasks({}, {{"SLURM_NTASKS", "5"}}, 2), (Counts{3, 2}));
  EXPECT_EQ(tasks({}, {{"SLURM_NTASKS_PER_NODE", "4"}}, 2), (Counts{4, 4}));
  EXPECT_EQ(tasks({"-N1"}, {{"SLURM_NTASKS", "5"}}, 2), Counts{5});
  EXPECT_EQ(tasks({"-n1"}, {{"SLURM_NTASKS", "5"}}, 2), Counts{1});
  EXPECT_EQ(tasks({"--ntasks-per-node=2"}, {}, 2), (Counts{2, 2}));
  EXPECT_EQ(tasks({"--ntasks-per-node=3", "-n", "4"}, {}, 2), (Counts{3, 1}));
  EXPECT_EQ(tasks({"--ntasks-per-node=4", "-n", "4"}, {}, 2), Counts{4});
  EXPECT_EQ(tasks({"--ntasks-per-node=1", "-n", "4"}, {}, 2), Counts{});
}

TEST(StepTest, NumbersTheTasksNodeByNode) {
  const Variables last = TaskVariables(4, {2, 3});
  EXPECT_EQ(last.at("SLURM_PROCID"), "4");
  EXPECT_EQ(last.at("SLURM_LOCALID"), "2");
  EXPECT_EQ(last.at("SLURM_NODEID"), "1");
  EXPECT_EQ(last.at("SLURM_NTASKS"), "5");
  EXPECT_EQ(last.at("SLURM_STEP_NUM_NODES"), "2");
  EXPECT_EQ(TaskVariables(1, {2, 3}).at("SLURM_NODEID"), "0");
}

TEST(StepTest, MakesTheCommandOfMpirun) {
  Step step;
  step.tasks = {2, 1};
  step.command = {"prog", "x"};
  step.mpi = Mpi::kPmix;
  EXPECT_EQ(LauncherWords(step, "orterun", {"10.9.0.1", "10.9.0.2"}, {"A"}, {"w", "--task"}),
            (Words{"orterun", "-n", "3", "--bind-to", "none", "--map-by", "slot", "--oversubscribe", "--host",
                   "10.9.0.1:2,10.9.0.2:1", "-x", "A", "w", "--task", "prog", "x"}));
  step.mpi = Mpi::kPmi2;
  EXPECT_EQ(LauncherWords(step, "mpiexec.hydra", {"10.9.0.1", "10.9.0.2", "10.9.0.3"}, {"A"}, {"w"}),
            (Words{"mpiexec.hydra", "-n", "3", "-hosts", "10.9.0.1:2,10.9.0.2:1", "w", "prog", "x"}));
  EXPECT_EQ(LauncherWords(step, "mpiexec.hydra", {}, {}, {"w"}), (Words{"mpiexec.hydra", "-n", "3", "w", "prog", "x"}));
}

TEST(PartPlanTest, ReadsTasksAndNodes) {
  EXPECT_EQ(ParseTasks("2(x2),1"), (std::vector<int>{2, 2, 1}));
  EXPECT_EQ(ParseTasks("4"), std::vector<int>{4});
  for (const char* wrong : {"", "x", "2(x", "2(y2)", "0"}) EXPECT_TRUE(ParseTasks(wrong).empty()) << wrong;
  const std::string text =
      "NodeName=n1 Arch=x86_64 NodeAddr=10.98.0.1 NodeHostName=n1\nNodeName=n12 NodeAddr=host12 NodeHostName=n12\n";
  const std::vector<Node> nodes = ParseNodes(text, {"n12", "n1"}).value();
  EXPECT_EQ(nodes.at(0).address, "host12");
  EXPECT_EQ(nodes.at(1).address, "10.98.0.1");
  EXPECT_FALSE(ParseNodes(text, {"n2"}).ok());
}

TEST(PartPlanTest, GivesEachJobAddressesOfItsOwn) {
  const std::vector<mpi::Part> parts = PlanParts("10.9.0.50-10.9.0.55/24@eth1", "4", {2, 3}).value();
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[0].address, "10.9.0.52/24@eth1");
  EXPECT_EQ(parts[1].ip, "10.9.0.53");
  EXPECT_EQ(parts[1].ranks, 3);
  EXPECT_EQ(PartsText(ParsePartsText(PartsText(parts)).value()), PartsText(parts));
  EXPECT_FALSE(ParsePartsText("").ok());
  for (const char* wrong : {"", "10.9.0.0/24", "10.9.0.9-10.9.0.1", "10.9.0.1-10.9.0.1", "10.9.0.1-x", "@a-b"}) {
    const std::string error(PlanParts(wrong, "4", {2, 3}).status().message());
    EXPECT_NE(error.find("--checkpoint-addresses"), std::string::npos) << error;
  }
}

TEST(PartPlanTest, PlacesThePartsOnTheNodesThatThereAre) {
  const std::vector<mpi::Part> parts = PlanParts("10.9.0.50-10.9.0.60", "0", {1, 1, 1}).value();
  EXPECT_EQ(HostsOf(PlaceParts(parts, {{"a", "10.1.0.1"}, {"b", "hb"}, {"c", "hc"}, {"d", "hd"}}, "j")),
            "10.1.0.1/j,hb/j,hc/j");
  const std::vector<PlacedPart> two = PlaceParts(parts, {{"a", "ha"}, {"b", "hb"}}, "j");
  EXPECT_EQ(HostsOf(two), "ha/j,ha/j-2,hb/j");
  EXPECT_EQ(two[1].index, 1);
  EXPECT_EQ(two[1].count, 2);
  EXPECT_EQ(two[2].count, 1);
  EXPECT_EQ(HostsOf(PlaceParts(parts, {{"a", "ha"}}, "j")), "ha/j,ha/j-2,ha/j-3");
}

TEST(PartPlanTest, DividesTheGpusOfANode) {
  EXPECT_EQ(ShareOfGpus("2,3", 0, 1), "2,3");
  EXPECT_EQ(ShareOfGpus("2,3", 1, 2), "3");
  EXPECT_EQ(ShareOfGpus("0,1,2,3", 1, 2), "2,3");
  EXPECT_EQ(ShareOfGpus("5", 1, 2), "5");
}

TEST(PartPlanTest, FindsTheNewestSetWithAllImages) {
  char folder[] = "/tmp/cr-sets-XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  const std::filesystem::path top = folder;
  const auto make = [&](const char* image) {
    std::filesystem::create_directories(top / image);
    std::ofstream(top / image / "manifest.pb") << "x";
  };
  EXPECT_EQ(NewestSetIn(folder, 2), "");
  make("image-000009/member-1");
  make("image-000009/member-2");
  make("image-000010/member-1");
  make("image-000010/member-2.partial");
  make("image-000008/member-1");
  make("image-000008/member-2");
  EXPECT_EQ(NewestSetIn(folder, 2), (top / "image-000009").string());
  EXPECT_EQ(NewestSetIn(folder, 1), (top / "image-000010").string());
  std::filesystem::remove_all(top);
}

TEST(JobStartTest, FindsASettingOfSlurms) {
  const std::string text = "Configuration data\nMpiDefault              = pmix\nMpiParams = (null)\n";
  EXPECT_EQ(SettingIn(text, "MpiDefault"), "pmix");
  EXPECT_EQ(SettingIn(text, "Mpi"), "");
}

TEST(JobStartTest, ReadsSlurmsVariables) {
  const std::string error(ReadSlurmJob({}).status().message());
  EXPECT_NE(error.find("SLURM_JOB_ID"), std::string::npos);
  SlurmJob job = ReadSlurmJob({{"SLURM_JOB_ID", "12"}, {"SLURM_JOB_NUM_NODES", "1"}}).value();
  EXPECT_EQ(job.Name(), "12");
  EXPECT_EQ(job.restarts, 0);
  job = ReadSlurmJob({{"SLURM_JOB_ID", "14"},
                      {"SLURM_ARRAY_JOB_ID", "12"},
                      {"SLURM_ARRAY_TASK_ID", "3"},
                      {"SLURM_RESTART_COUNT", "2"}})
            .value();
  EXPECT_EQ(job.Name(), "12_3");
  EXPECT_EQ(job.restarts, 2);
  EXPECT_EQ(Expand("%A_%a %j 5%% %x%", job), "12_3 14 5% %x%");
  EXPECT_FALSE(ReadSlurmJob({{"SLURM_JOB_ID", "1"}, {"SLURM_STEP_NUM_TASKS", "4"}}).ok());
  job = ReadSlurmJob({{"SLURM_JOB_ID", "1"}, {"SLURM_JOB_NUM_NODES", "2"}, {"SLURM_TASKS_PER_NODE", "4(x2)"}}).value();
  EXPECT_EQ(job.nodes, 2);
  EXPECT_EQ(job.tasks, "4(x2)");
}

TEST(JobStartTest, KnowsTheGpuNodeOfAHeterogeneousJob) {
  const auto read = [](const char* components, const char* nodes) {
    return ReadSlurmJob(
        {{"SLURM_JOB_ID", "1"}, {"SLURM_HET_SIZE", components}, {"SLURM_JOB_NUM_NODES_HET_GROUP_1", nodes}});
  };
  EXPECT_TRUE(read("2", "1").value().has_gpu_node);
  EXPECT_FALSE(ReadSlurmJob({{"SLURM_JOB_ID", "1"}}).value().has_gpu_node);
  const std::string error(read("2", "4").status().message());
  EXPECT_NE(error.find("4 nodes in the second"), std::string::npos);
  EXPECT_FALSE(read("3", "1").ok());
}

TEST(JobStartTest, RestartsOnlyImagesOfItsOwn) {
  SlurmJob job;
  job.id = "12";
  EXPECT_EQ(ChooseStart(job, "/f", "").value(), Start::kProgram);
  const std::string error(ChooseStart(job, "/f", "/f/image-000001").status().message());
  EXPECT_NE(error.find("/f"), std::string::npos);
  job.restarts = 1;
  EXPECT_EQ(ChooseStart(job, "/f", "/f/image-000001").value(), Start::kImage);
  EXPECT_EQ(ChooseStart(job, "/f", "").value(), Start::kProgram);
}

TEST(JobStartTest, NumbersTheGpus) {
  std::string seen;
  EXPECT_TRUE(NumberGpus("2,3", &seen));
  EXPECT_EQ(seen, "0,1");
  EXPECT_TRUE(NumberGpus("GPU-00112233-4455-6677-8899-aabbccddee00", &seen));
  EXPECT_EQ(seen, "0");
  EXPECT_FALSE(NumberGpus("", &seen));
  EXPECT_FALSE(NumberGpus("NoDevFiles", &seen));
  EXPECT_FALSE(NumberGpus("0,", &seen));
}

}  // namespace
}  // namespace cuda_remote::client::slurm
