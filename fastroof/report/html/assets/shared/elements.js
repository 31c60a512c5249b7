// Elements of the pages.

export const byId = (id) => document.getElementById(id);

// Attributes are given by name, or as a text that is the class.
export function make(tag, text, attributes = {}) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  const given = typeof attributes === "string" ? { class: attributes } : attributes;
  for (const [name, words] of Object.entries(given)) element.setAttribute(name, words);
  return element;
}
