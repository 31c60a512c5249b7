// Shared by all charts: colours of lines, layout, drawing.

// Neighbouring lines differ most in this order of the groups' colours.
const ORDER = [0, 2, 4, 3, 6, 1, 5, 7];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "star", "triangle-down", "hexagon"];

const colourName = (i) => groupName(ORDER[i % 8]);
const colourAt = (i) => ink(colourName(i));

// Ticks have whole numbers: 2,000 instead of 2k, and on a logarithmic axis 20 instead of 2.
function axis(title, more) {
  return {
    title: { text: title, standoff: 8 }, gridcolor: ink("--grid"), linecolor: ink("--line"), zeroline: false,
    automargin: true, ticks: "outside", tickcolor: ink("--line"), tickformat: ",", tickangle: 0,
    ...(more?.type === "log" ? { nticks: 4 } : {}), ...more,
  };
}

function layout(more) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: ink("--ink") },
    margin: { l: 62, r: isNarrow() ? 8 : 44, t: 44, b: 48 }, hovermode: "closest", hoverdistance: 24,
    hoverlabel: { bgcolor: ink("--card"), bordercolor: ink("--line"), font: { color: ink("--ink") }, align: "left" },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", itemclick: false, itemdoubleclick: false },
    modebar: { orientation: "v", bgcolor: "rgba(0,0,0,0)", color: ink("--quiet"), activecolor: ink("--accent") },
    ...more,
  };
}

const CONFIG = {
  responsive: true, displaylogo: false, showSendToCloud: false, showEditInChartStudio: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
};

// Narrow windows get no chart buttons: touch gestures replace them.
const isNarrow = () => window.innerWidth < 600;

const listening = new Set();

function draw(id, traces, shape) {
  const chart = byId(id);
  const words = traces.length ? [] : [{
    text: "nothing to draw", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5, font: { size: 15 },
  }];
  const annotations = [...(shape.annotations || []), ...words];
  if (words.length) shape = { ...shape, xaxis: { visible: false }, yaxis: { visible: false } };
  const config = { ...CONFIG, displayModeBar: isNarrow() ? false : "hover", toImageButtonOptions: { format: "svg", filename: `fastroof-${id}` } };
  Plotly.react(chart, traces, layout({ ...shape, annotations }), config);
  if (!listening.has(id)) {
    listening.add(id);
    chart.on("plotly_click", (event) => {
      const row = event.points[0].customdata;
      if (Number.isInteger(row)) select(row);
    });
  }
}

// A limit as a line, in a chart's unit, unless it is far outside the drawn range.
function limitLine(name, along, largest, unit = 1) {
  const at = facts.limits[name] / unit;
  if (!(at <= 1.5 * largest)) return [];
  const line = { color: ink("--quiet"), dash: "dash", width: 1.5 };
  const place = along === "x"
    ? { x0: at, x1: at, y0: 0, y1: 1, yref: "paper" } : { y0: at, y1: at, x0: 0, x1: 1, xref: "paper" };
  return [{ type: "line", line, ...place }];
}
