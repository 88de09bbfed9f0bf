// Numbers and times as people read them.

const number = new Intl.NumberFormat("en");

export const count = (value) => (value == null ? "–" : number.format(Math.round(value)));

export const fixed = (value, digits = 1) =>
  value == null || !Number.isFinite(value) ? "–" : value.toFixed(digits);

export const percent = (share) => (share == null || !Number.isFinite(share) ? "–" : `${Math.round(share * 100)} %`);

export function bytes(value) {
  if (value == null) return "–";
  let unit = 0;
  while (value >= 1024 && unit < 4) {
    value /= 1024;
    unit += 1;
  }
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

export function seconds(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.1 ? 1 : 0)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

export const clock = (unixSeconds) => new Date(unixSeconds * 1e3).toLocaleTimeString();
