// The selected row in plain words, with units and what is left to its limits.

function limitWords(row, name) {
  const limit = facts.limits[name], found = value(row, name);
  if (limit === undefined || typeof found !== "number") return "";
  const higher = !LOWER_IS_BETTER.test(name);
  const left = higher ? found / limit - 1 : 1 - found / limit;
  const of = SHARES.has(name) ? percent(limit) : name.endsWith("_ms") ? milliseconds(limit) : write(limit);
  return ` (${higher ? "at least" : "at most"} ${of}: ${percent(Math.abs(left))} ${left < 0 ? "beyond" : "left"})`;
}

// Groups of [name, words, value] of what a row has.
function toldRow(row) {
  const isTold = (name) => {
    const found = columns.has(name) ? value(row, name) : null;
    if (found === null || found === "" || NOTHING[name] === found) return false;
    return name !== "accepted" && name !== "draft" || value(row, "num_draft_tokens") > 0;
  };
  const groups = ROW_GROUPS.map(([heading, words]) => [heading, Object.keys(words).filter(isTold)]);
  const rest = [...columns.keys()].filter((name) => !(name in PLAIN) && isTold(name));
  if (rest.length) groups.push(["More", rest]);
  return groups.filter(([, names]) => names.length).map(([heading, names]) => [
    heading, names.map((name) => [name, PLAIN[name] || label(name), said(row, name) + limitWords(row, name)]),
  ]);
}

function drawSelected() {
  const row = state.selected;
  byId("copy-selected").disabled = row === null;
  byId("selected-heading").textContent = row === null ? "Selected row" : `Selected row: ${whole.format(row + 1)}`;
  if (row === null) {
    byId("selected").replaceChildren(make("p", "No row is selected: the filters leave none."));
    return;
  }
  byId("selected").replaceChildren(...toldRow(row).map(([heading, told]) => {
    const group = make("div", null, { class: "told" });
    const list = make("dl");
    for (const [name, words, found] of told) {
      const pair = make("div", null, { "data-name": name });
      pair.append(make("dt", words, { title: columns.get(name).meaning || name }), make("dd", found));
      list.append(pair);
    }
    group.append(make("h3", heading), list);
    return group;
  }));
}
