// Questions: one of each kind at a time, and the newest view next; an answer that is outdated is not shown.

async function post(question, view) {
  const reply = await fetch(`ask/${question}`, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(view),
  });
  const answer = await reply.json();
  if (!reply.ok) throw new Error(answer.message);
  return answer;
}

// showsAll: answers on the way to the newest are shown too, as a picture follows a slider.
export function questioner(question, { delayMs = 0, showsAll = false, show, fail, waits = () => {} }) {
  let wanted = null;
  let isOpen = false;
  let timer = 0;

  async function next() {
    if (isOpen || wanted === null) return;
    const view = wanted;
    wanted = null;
    isOpen = true;
    let shown;
    try {
      const answer = await post(question, view);
      shown = () => show(answer, view);
    } catch (error) {
      const gone = error instanceof TypeError;
      shown = () => fail(gone ? "fastroof ui does not answer: it was closed, or never started" : error.message, view);
    }
    isOpen = false;
    if (wanted === null || showsAll) shown();
    next();
  }

  return function ask(view) {
    clearTimeout(timer);
    waits();
    if (!delayMs) {
      wanted = view;
      next();
      return;
    }
    timer = setTimeout(() => {
      wanted = view;
      next();
    }, delayMs);
  };
}
