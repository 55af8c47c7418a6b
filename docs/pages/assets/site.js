// Each choice holds on every page: how a diff is shown, and which of the results.
function remembered(name) {
  try {
    return localStorage.getItem(`ladder.${name}`)
  } catch {
    return null // a browser that is told to keep nothing
  }
}

function show(name, value) {
  for (const input of document.querySelectorAll(`[data-choice="${name}"] input`)) input.checked = input.value === value
  document.documentElement.dataset[name] = value
  for (const section of document.querySelectorAll(`[data-${name}]:not(html)`)) section.hidden = section.dataset[name] !== value
}

for (const choice of document.querySelectorAll("[data-choice]")) {
  const name = choice.dataset.choice
  const values = [...choice.querySelectorAll("input")].map((input) => input.value)
  const before = remembered(name)
  show(name, values.includes(before) ? before : values[0])
  choice.addEventListener("change", (event) => {
    show(name, event.target.value)
    try {
      localStorage.setItem(`ladder.${name}`, event.target.value)
    } catch {}
  })
}

// Two scripts are always compared in the order of the ladder: the pages are named so.
for (const form of document.querySelectorAll("form.compare")) {
  form.addEventListener("change", () => form.after.setCustomValidity(""))
  form.addEventListener("submit", (event) => {
    event.preventDefault()
    const [low, high] = [form.before, form.after].sort((a, b) => a.selectedIndex - b.selectedIndex)
    if (low.value !== high.value) return location.assign(`${form.dataset.folder}${low.value}--${high.value}.html`)
    form.after.setCustomValidity("Choose two different scripts.")
    form.after.reportValidity()
  })
}
