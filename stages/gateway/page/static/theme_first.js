// Runs before the page is drawn, so that a chosen theme does not flash.
try {
  const theme = JSON.parse(localStorage.getItem("pipeline.theme") ?? "null");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Without storage, the page follows the system.
}
