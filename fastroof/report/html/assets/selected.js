// The selected row with units and margins to its limits.

function limitWords(row, name) {
  const limit = facts.limits[name], found = value(row, name);
  if (limit === undefined || typeof found !== "number") return "";
  const higher = !LOWER_IS_BETTER.test(name);
  const left = higher ? found / limit - 1 : 1 - found / limit;
  const of = SHARES.has(name) ? percent(limit) : name.endsWith("_ms") ? milliseconds(limit) : write(limit);
  return ` (${higher ? "at least" : "at most"} ${of}: ${percent(Math.abs(left))} ${left < 0 ? "beyond" : "left"})`;
}

// Groups of [name, label, value] of a row, without values that are not worth showing.
function describedRow(row) {
  const isShown = (name) => {
    const found = columns.has(name) ? value(row, name) : null;
    if (found === null || found === "" || NOTHING[name] === found) return false;
    return name !== "accepted" && name !== "draft" || value(row, "num_draft_tokens") > 0;
  };
  const groups = ROW_GROUPS.map(([heading, words]) => [heading, Object.keys(words).filter(isShown)]);
  const rest = [...columns.keys()].filter((name) => !(name in PLAIN) && isShown(name));
  if (rest.length) groups.push(["More", rest]);
  return groups.filter(([, names]) => names.length).map(([heading, names]) => [
    heading, names.map((name) => [name, PLAIN[name] || label(name), withUnit(row, name) + limitWords(row, name)]),
  ]);
}

function drawSelected() {
  const row = state.selected;
  byId("copy-selected").disabled = row === null;
  byId("selected-heading").textContent = row === null ? "Selected row" : `Selected row: ${whole.format(row + 1)}`;
  if (row === null) {
    byId("selected").replaceChildren(make("p", "No row is selected: no row matches the filters."));
    return;
  }
  byId("selected").replaceChildren(...describedRow(row).map(([heading, entries]) => {
    const group = make("div", null, { class: "described" });
    const list = make("dl");
    for (const [name, words, found] of entries) {
      const pair = make("div", null, { "data-name": name });
      pair.append(make("dt", words, { title: columns.get(name).meaning || name }), make("dd", found));
      list.append(pair);
    }
    group.append(make("h3", heading), list);
    return group;
  }));
}
