// Questions: one of each kind is open at a time, then the newest view follows; outdated answers are not shown.

async function post(question, view, signal) {
  const reply = await fetch(`ask/${question}`, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(view), signal,
  });
  const answer = await reply.json();
  if (!reply.ok) throw new Error(answer.message);
  return answer;
}

// showsAll: outdated answers are shown too, so that the charts follow a slider; overtakes: a newer question ends the open one.
export function questioner(question, { delayMs = 0, showsAll = false, overtakes = false, show, fail, waits = () => {} }) {
  let pending = null;
  let isOpen = false;
  let timer = 0;
  let open = null;

  async function next() {
    if (isOpen || pending === null) return;
    const view = pending;
    pending = null;
    isOpen = true;
    let shown;
    try {
      open = new AbortController();
      const answer = await post(question, view, open.signal);
      shown = () => show(answer, view);
    } catch (error) {
      const gone = error instanceof TypeError;
      shown = () => fail(gone ? "fastroof ui does not respond: it is not running" : error.message, view);
    }
    isOpen = false;
    if (pending === null || showsAll) shown();
    next();
  }

  return function ask(view) {
    clearTimeout(timer);
    waits();
    if (!delayMs) {
      pending = view;
      if (overtakes) open?.abort();
      next();
      return;
    }
    timer = setTimeout(() => {
      pending = view;
      next();
    }, delayMs);
  };
}
