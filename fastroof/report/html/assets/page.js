// The page's data, and formatting of numbers and texts.

const report = JSON.parse(document.getElementById("results").textContent);
const facts = report.facts;

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });

// The decimals that give a number four significant digits, and a format with that many.
const decimals = (found) => Math.min(Math.max(3 - Math.floor(Math.log10(Math.abs(found) || 1)), 0), 6);
const fixed = (places) => new Intl.NumberFormat("en", { minimumFractionDigits: places, maximumFractionDigits: places });

// The unit in which times up to a number of ms are readable, and its length in ms.
function unitOf(ms) {
  return ms < 1e5 ? ["ms", 1] : ms < 1e7 ? ["s", 1e3] : ["h", 3.6e6];
}

// Sizes like those of a batch or context: 512, 4k, 128k.
const sizeWords = (size) => (size >= 1024 && size % 1024 === 0 ? `${size / 1024}k` : write(size));

function write(found, column) {
  if (found === null || found === undefined) return "–";
  if (typeof found !== "number") return String(found);
  if (column && column.unit === "B" && Math.abs(found) >= 1e6) return `${short.format(found / 1e9)} GB`;
  return Number.isInteger(found) || Math.abs(found) >= 1e4 ? whole.format(found) : short.format(found);
}

// Escape text for Plotly, which interprets some tags.
function plain(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1;
  if (b === null || b === undefined) return -1;
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
}
