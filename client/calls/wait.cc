// SPDX-License-Identifier: Apache-2.0
#include "client/calls/wait.h"

#include "client/core/session.h"

namespace cuda_remote::client {

bool IsKnown(Session& session, Question* question) {
  ReaderLock lock(&session.objects().mutex());
  const Object* const object = session.objects().handles().Find(question->kind, question->object);
  if (!object || object->between_processes) return false;
  const Completions& completions = session.completions();
  question->stamp = question->kind == Kind::kEvent ? completions.EventStamp(question->object)
                                                   : completions.WorkStamp(session.channel().last_marked());
  if (session.settings().sync) return false;
  return (question->waits ? object->synchronized_at : object->done_at).load(std::memory_order_relaxed) ==
         question->stamp;
}

CUresult AnswerKnown(Session& session, const Question& question) {
  if (question.waits) session.memory().NoteWaited();
  return session.TakePendingError();
}

CUresult AskServer(Call& call, const Question& question) {
  const CUresult result = call.Transact();
  if (result != CUDA_SUCCESS) return result;
  Session& session = call.session();
  ReaderLock lock(&session.objects().mutex());
  if (Object* const object = session.objects().handles().Find(question.kind, question.object)) {
    object->done_at.store(question.stamp, std::memory_order_relaxed);
    if (question.waits) object->synchronized_at.store(question.stamp, std::memory_order_relaxed);
  }
  return result;
}

}  // namespace cuda_remote::client
