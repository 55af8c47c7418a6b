// Runs in the head, so that a page is painted as it was chosen: how a diff is shown, and which of the results.
const chosen = document.head.appendChild(document.createElement("style"))

function remembered(name) {
  try {
    return localStorage.getItem(`ladder.${name}`) ?? ""
  } catch {
    return "" // a browser that is told to keep nothing
  }
}

function show(name, value) {
  document.documentElement.dataset[name] = value
  if (name !== "result") return
  const others = value ? `.result:not([data-result="${CSS.escape(value)}"])` : ".result ~ .result"
  chosen.textContent = `${others} { display: none }`
}

for (const name of ["view", "result"]) show(name, remembered(name))

// pageshow, too: a page that the reader comes back to may be as it was left
function settle() {
  for (const choice of document.querySelectorAll("[data-choice]")) {
    const name = choice.dataset.choice
    const inputs = [...choice.querySelectorAll("input")]
    const input = inputs.find((input) => input.value === remembered(name)) ?? inputs[0]
    input.checked = true
    show(name, input.value)
  }
}

addEventListener("pageshow", settle)
document.addEventListener("DOMContentLoaded", () => {
  settle()
  for (const choice of document.querySelectorAll("[data-choice]")) {
    choice.addEventListener("change", (event) => {
      show(choice.dataset.choice, event.target.value)
      try {
        localStorage.setItem(`ladder.${choice.dataset.choice}`, event.target.value)
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

  // What a search found is marked in the page: open what it is folded into.
  if (!new URLSearchParams(location.search).has("h")) return
  new MutationObserver(() => {
    for (const mark of document.querySelectorAll("details:not([open]) mark")) mark.closest("details").open = true
  }).observe(document.body, { childList: true, subtree: true })
})
