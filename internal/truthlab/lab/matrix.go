package lab

import (
	"fmt"
	"html"
	"io"
	"slices"
	"strings"

	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// Confusion counts affected requests by the stage that was injected and the one
// that was named. Scenarios that are declared invisible are left out.
func (r *Report) Confusion() map[string]map[string]int {
	m := map[string]map[string]int{}
	for _, s := range r.Scenarios {
		if s.Invisible != "" {
			continue
		}
		for named, n := range s.Named {
			if m[s.Stage] == nil {
				m[s.Stage] = map[string]int{}
			}
			m[s.Stage][named] += n
		}
	}
	return m
}

// accepted is the part of Confusion that was right where it was named.
func (r *Report) accepted() map[string]map[string]int {
	right := &Report{}
	for _, s := range r.Scenarios {
		only := *s
		only.Named = map[string]int{}
		for named, n := range s.Named {
			if accepts(s.Stage, s.Also, named) {
				only.Named[named] = n
			}
		}
		right.Scenarios = append(right.Scenarios, &only)
	}
	return right.Confusion()
}

// stageOrder sorts stages as the project lists them, others after them by name, and
// what is no stage last.
func stageOrder(a, b string) int {
	place := func(name string) int {
		if name == noStage || name == noSpan {
			return stage.Count + 1
		}
		if s, ok := stage.Parse(name); ok {
			return int(s)
		}
		return stage.Count
	}
	if d := place(a) - place(b); d != 0 {
		return d
	}
	return strings.Compare(a, b)
}

// Draw writes the confusion matrix as an SVG picture: a row per injected stage, a
// column per stage named, each cell with the share of its row.
func (r *Report) Draw(w io.Writer) error {
	m, right := r.Confusion(), r.accepted()
	var rows, cols []string
	for injected, by := range m {
		rows = append(rows, injected)
		for named := range by {
			if !slices.Contains(cols, named) {
				cols = append(cols, named)
			}
		}
		if !slices.Contains(cols, injected) {
			cols = append(cols, injected)
		}
	}
	slices.SortFunc(rows, stageOrder)
	slices.SortFunc(cols, stageOrder)

	const cell, left, top = 44, 190, 150
	width, height := left+cell*len(cols)+20, top+cell*len(rows)+50
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">`+"\n", width, height, width, height)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="#ffffff"/>`+"\n", width, height)
	fmt.Fprintf(&b, `<text x="10" y="20" font-size="14">Injected stage (rows) × stage named (columns), percent of the row's requests</text>`+"\n")
	for i, name := range cols {
		x := left + cell*i + cell/2
		fmt.Fprintf(&b, `<text transform="translate(%d,%d) rotate(-55)">%s</text>`+"\n", x, top-8, html.EscapeString(name))
	}
	for j, injected := range rows {
		y := top + cell*j
		total := 0
		for _, n := range m[injected] {
			total += n
		}
		fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="end">%s (%d)</text>`+"\n", left-8, y+cell/2+4, html.EscapeString(injected), total)
		for i, named := range cols {
			n := m[injected][named]
			p := 100 * share(n, total)
			// right ones green, wrong ones red, those that are either yellow; the more the darker
			fill := "#f4f4f4"
			if n > 0 {
				light := 92 - p/2
				hue := 4
				switch right[injected][named] {
				case n:
					hue = 140
				case 0:
				default: // right in some scenarios
					hue = 60
				}
				fill = fmt.Sprintf("hsl(%d,55%%,%.0f%%)", hue, light)
			}
			fmt.Fprintf(&b, `<rect x="%d" y="%d" width="%d" height="%d" fill="%s" stroke="#ffffff"><title>%s named %s: %d of %d</title></rect>`+"\n",
				left+cell*i, y, cell, cell, fill, html.EscapeString(injected), html.EscapeString(named), n, total)
			if n > 0 {
				fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="middle">%s</text>`+"\n", left+cell*i+cell/2, y+cell/2+4, strings.TrimSuffix(fmt.Sprintf("%.1f", p), ".0"))
			}
		}
	}
	fmt.Fprintf(&b, `<text x="10" y="%d" fill="#555555">%s</text>`+"\n</svg>\n", height-15, html.EscapeString(r.Time.Format("2006-01-02")+", "+r.Machine))
	_, err := io.WriteString(w, b.String())
	return err
}
