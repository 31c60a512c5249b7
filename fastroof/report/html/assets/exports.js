// Rows as CSV and on the clipboard.

// Prefix text that a spreadsheet would run as a formula with an apostrophe, as in CSV files of fastroof.
const FORMULA = /^'*[=+\-@\t\r\n]/;

function guarded(text) {
  return FORMULA.test(text) ? `'${text}` : text;
}

function field(found, separator) {
  if (found === null || found === undefined) return "";
  if (typeof found === "number") return String(found);
  const text = guarded(String(found));
  return new RegExp(`[${separator}"\\r\\n]`).test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

// The filtered rows in the table's order, with all columns of the results.
function rowsAsText(separator) {
  const names = [...columns.keys()];
  const lines = sorted().map((row) => names.map((name) => field(value(row, name), separator)).join(separator));
  return [names.map((name) => field(name, separator)).join(separator), ...lines, ""].join("\r\n");
}

function selectedAsText() {
  const groups = describedRow(state.selected).map(([heading, entries]) =>
    [heading, ...entries.map(([, words, found]) => `  ${words}: ${found}`)].join("\n"));
  return [`${document.title}, row ${state.selected + 1}`, ...groups, ""].join("\n").replaceAll("\u00a0", " ");
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // in some browsers, pages opened from a file have no clipboard
    const area = make("textarea", text, { "aria-hidden": "true", class: "offscreen" });
    const before = document.activeElement;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    if (before) before.focus();
    return done;
  }
}

function save(text, name) {
  const address = URL.createObjectURL(new Blob([text], { type: "text/csv;charset=utf-8" }));
  const link = make("a", null, { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

function listenToExports() {
  const showStatus = (id, words) => { byId(id).textContent = words; };
  byId("copy-rows").addEventListener("click", async () => {
    const done = await copy(rowsAsText("\t"));
    showStatus("exported", done ? `${whole.format(state.shown.length)} rows copied` : "this browser does not let pages copy");
  });
  byId("csv").addEventListener("click", () => {
    save(rowsAsText(","), `${document.title.replace(/[^A-Za-z0-9.-]+/g, "-").slice(0, 80)}.csv`);
    showStatus("exported", `${whole.format(state.shown.length)} rows saved`);
  });
  byId("copy-selected").addEventListener("click", async () => {
    showStatus("copied", (await copy(selectedAsText())) ? "copied" : "this browser does not let pages copy");
  });
}
