package lab

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"
)

// Report is the outcome of a run, and what is written to out/truth.json.
type Report struct {
	Scenarios []*Result `json:"scenarios"`
	Stages    []ByStage `json:"stages"` // made of the scenarios by Save
	Lost      int64     `json:"lost_records"`
	Machine   string    `json:"machine"`
	Time      time.Time `json:"time"`
	Size      string    `json:"size"`
}

// NewReport is an empty one for this machine.
func NewReport(size Size) *Report {
	return &Report{
		Scenarios: []*Result{}, Machine: machine(), Time: time.Now().UTC().Truncate(time.Second),
		Size: fmt.Sprintf("at least %d affected and %d unaffected requests per scenario", size.Affected, size.Unaffected),
	}
}

// machine describes where the figures come from.
func machine() string {
	var u unix.Utsname
	kernel := "unknown kernel"
	if unix.Uname(&u) == nil {
		kernel = "Linux " + unix.ByteSliceToString(u.Release[:])
	}
	model := "unknown CPU"
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(b)) {
			if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
				model = strings.TrimSpace(value)
				break
			}
		}
	}
	return fmt.Sprintf("%s, %d CPUs (%s), %s", kernel, runtime.NumCPU(), model, runtime.Version())
}

// Add puts a result into the report, in place of an earlier one of that scenario.
func (r *Report) Add(result *Result) {
	i := slices.IndexFunc(r.Scenarios, func(o *Result) bool { return o.Name == result.Name })
	if i >= 0 {
		r.Lost -= r.Scenarios[i].Lost
		r.Scenarios[i] = result
	} else {
		r.Scenarios = append(r.Scenarios, result)
	}
	r.Lost += result.Lost
}

// ReadReport reads one that Save has written.
func ReadReport(path string) (*Report, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	r := &Report{}
	if err := json.Unmarshal(b, r); err != nil {
		return nil, fmt.Errorf("%s is no report of the truth lab: %w", path, err)
	}
	if r.Scenarios == nil || r.Time.IsZero() || slices.Contains(r.Scenarios, nil) {
		return nil, fmt.Errorf("%s is no whole report of the truth lab: it lacks its time or its scenarios; make it anew", path)
	}
	return r, nil
}

// HasOthers tells whether it holds results of other scenarios than these.
func (r *Report) HasOthers(than []Scenario) bool {
	return slices.ContainsFunc(r.Scenarios, func(has *Result) bool {
		return !slices.ContainsFunc(than, func(s Scenario) bool { return s.Name == has.Name })
	})
}

// sources are the machines and times of the results, as a phrase.
func (r *Report) sources() string {
	type span struct {
		from, to time.Time
		n        int
	}
	of := map[string]*span{}
	var order []string
	for _, s := range r.Scenarios {
		if s.Machine == "" {
			continue
		}
		if of[s.Machine] == nil {
			of[s.Machine] = &span{from: s.Time, to: s.Time}
			order = append(order, s.Machine)
		}
		m := of[s.Machine]
		m.n++
		if s.Time.Before(m.from) {
			m.from = s.Time
		}
		if s.Time.After(m.to) {
			m.to = s.Time
		}
	}
	if len(order) == 0 {
		return fmt.Sprintf("%s, on %s", r.Time.Format(timeFormat), r.Machine)
	}
	var parts []string
	for _, machine := range order {
		m := of[machine]
		text := fmt.Sprintf("%s to %s, on %s", m.from.Format(timeFormat), m.to.Format(timeFormat), machine)
		if len(order) > 1 {
			text += fmt.Sprintf(" (%d scenarios)", m.n)
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, "; ")
}

const timeFormat = "2006-01-02 15:04 MST"

// inCell is text as it may stand in a cell of a Markdown table.
func inCell(text string) string {
	return strings.NewReplacer("|", "\\|", "\n", " ", "\r", " ").Replace(text)
}

// ByStage is how well a stage is told over all scenarios but the invisible ones.
type ByStage struct {
	Stage    string `json:"stage"`
	Injected int    `json:"injected"` // affected requests of scenarios of this stage
	Right    int    `json:"right"`    // of those, named as one that is right there
	Named    int    `json:"named"`    // requests named as this stage, unaffected ones included
	NamedOK  int    `json:"named_ok"` // of those, where it is right

	Recall    float64 `json:"recall"`    // Right of Injected; 0 if none was injected
	Precision float64 `json:"precision"` // NamedOK of Named; 0 if it was never named
}

// byStage adds the scenarios up.
func (r *Report) byStage() (all []ByStage) {
	of := func(name string) *ByStage {
		i := slices.IndexFunc(all, func(b ByStage) bool { return b.Stage == name })
		if i < 0 {
			i = len(all)
			all = append(all, ByStage{Stage: name})
		}
		return &all[i]
	}
	for _, s := range r.Scenarios {
		if s.Invisible != "" {
			continue
		}
		injected := of(s.Stage)
		injected.Injected += s.Affected
		injected.Right += s.Right
		for named, n := range s.Named {
			b := of(named)
			b.Named += n
			if accepts(s.Stage, s.Also, named) {
				b.NamedOK += n
			}
		}
		for named, n := range s.FalseNamed {
			of(named).Named += n
		}
	}
	for i := range all {
		all[i].Recall, all[i].Precision = share(all[i].Right, all[i].Injected), share(all[i].NamedOK, all[i].Named)
	}
	slices.SortFunc(all, func(a, b ByStage) int { return stageOrder(a.Stage, b.Stage) })
	return all
}

// Save writes the report as JSON.
func (r *Report) Save(path string) error {
	r.Stages = r.byStage()
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return WriteWhole(path, append(b, '\n'))
}

// WriteWhole writes a file so that whoever reads it finds the old or the new one, whole.
func WriteWhole(path string, content []byte) error {
	part := path + ".part"
	if err := os.WriteFile(part, content, 0o644); err != nil {
		return err
	}
	return os.Rename(part, path)
}

// columns of the table, by what a cell is called, with its head.
var columns = []struct{ what, head string }{
	{cellRight, "right"},
	{cellBlamed, "blamed"},
	{cellFalse, "false blame"},
	{cellUnseen, "no span"},
	{cellShared, "shared"},
	{cellP50, "err p50"},
	{cellP95, "err p95"},
	{cellLeft, "wait+unattr."},
	{cellOver, "over"},
	{cellLost, "lost"},
}

// cell is the text of a result in a column.
func (r *Result) cell(what string) string {
	cells := r.Cells()
	i := slices.IndexFunc(cells, func(c Cell) bool { return c.What == what })
	var text string
	switch what {
	case cellRight:
		text = fmt.Sprintf("%d/%d", r.Right, r.Affected)
	case cellBlamed:
		text = fmt.Sprintf("%d/%d", r.Blamed, r.Affected)
	case cellUnseen:
		text = strconv.Itoa(r.Unseen + r.Partial)
	case cellFalse:
		text = fmt.Sprintf("%d/%d", r.FalseBlame, r.Unaffected)
	case cellP50:
		text = percent(r.LatencyErrorP50)
	case cellP95:
		text = percent(r.LatencyErrorP95)
	case cellLeft:
		text = percent(r.UnattributedShare)
	case cellShared:
		text = fmt.Sprintf("%d/%d", r.SharedRight, r.SharedOf)
	case cellOver:
		text = percent(r.Over)
	case cellLost:
		text = strconv.FormatInt(r.Lost, 10)
	}
	switch {
	case r.Skipped != "" || r.Affected == 0 || what == cellBlamed && !r.Control || what == cellShared && r.SharedOf == 0:
		return "–"
	case i < 0 && r.Control && (what == cellP50 || what == cellP95 || what == cellLeft):
		return "–"
	case i < 0:
		return "(" + text + ")" // held to no bar
	case cells[i].Missed > 1e-9 && what == cellLost:
		return text + " MISSED"
	case cells[i].Missed > 1e-9:
		return fmt.Sprintf("%s MISSED by %.1f", text, 100*cells[i].Missed)
	}
	return text
}

func percent(share float64) string { return fmt.Sprintf("%.1f%%", 100*share) }

// note is what has to be said of a result beside its figures.
func (r *Result) note() string {
	var notes []string
	switch {
	case r.Skipped != "":
		return "skipped: " + r.Skipped
	case r.Invisible != "":
		notes = append(notes, "invisible: "+r.Invisible)
	}
	if len(r.Brings) > 0 {
		notes = append(notes, "with what it costs in "+strings.Join(r.Brings, ", "))
	}
	if r.Evidence != "" {
		notes = append(notes, "told by "+r.Evidence)
	}
	if r.Error != "" {
		notes = append(notes, "ERROR: "+r.Error)
	}
	if wrong := r.wrong(); wrong != "" {
		notes = append(notes, wrong)
	}
	if r.Missing > 0 {
		notes = append(notes, fmt.Sprintf("%d requests without a span", r.Missing))
	}
	if r.Incomplete > 0 {
		notes = append(notes, fmt.Sprintf("%d incomplete", r.Incomplete))
	}
	if r.Disturbed > 0 {
		notes = append(notes, fmt.Sprintf("%d set aside, as the host delayed them as well", r.Disturbed))
	}
	if r.HostStalls > 0 {
		notes = append(notes, fmt.Sprintf("%d stalls by the host itself", r.HostStalls))
	}
	return strings.Join(notes, "; ")
}

// wrong lists what else was named than the stage.
func (r *Result) wrong() string {
	var parts []string
	for _, named := range sortedByCount(r.Named) {
		if named != r.Stage {
			parts = append(parts, fmt.Sprintf("%d named %s", r.Named[named], named))
		}
	}
	for _, named := range sortedByCount(r.FalseNamed) {
		parts = append(parts, fmt.Sprintf("%d unaffected blamed on %s", r.FalseNamed[named], named))
	}
	return strings.Join(parts, ", ")
}

func sortedByCount(m map[string]int) []string {
	var names []string
	for name := range m {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int {
		if m[a] != m[b] {
			return m[b] - m[a]
		}
		return strings.Compare(a, b)
	})
	return names
}

// Write prints the table.
func (r *Report) Write(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprint(t, "scenario\tstage\tadded")
	for _, c := range columns {
		fmt.Fprint(t, "\t", c.head)
	}
	fmt.Fprintln(t, "\tnotes")
	for _, s := range r.Scenarios {
		fmt.Fprintf(t, "%s\t%s\t%.1f ms", s.Name, s.Stage, 1e3*s.Added)
		for _, c := range columns {
			fmt.Fprint(t, "\t", s.cell(c.what))
		}
		fmt.Fprintf(t, "\t%s\n", strings.ReplaceAll(s.note(), "\n", " "))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "%s\nlost_records=%d\n", r.Summary(), r.Lost)
	return err
}

// Summary counts the scenarios by what became of them.
func (r *Report) Summary() string {
	var held, missed, invisible, skipped, broken int
	for _, s := range r.Scenarios {
		switch {
		case s.Skipped != "":
			skipped++
		case s.Error != "":
			broken++
		case s.Invisible != "":
			invisible++
		case s.Failed():
			missed++
		default:
			held++
		}
	}
	return fmt.Sprintf("%d scenarios: %d hold every bar, %d miss one, %d could not be run to their end, %d declared invisible, %d skipped",
		len(r.Scenarios), held, missed, broken, invisible, skipped)
}

// Err names the scenarios that are a reason to fail.
func (r *Report) Err() error {
	var errs []error
	for _, s := range r.Scenarios {
		if s.Error != "" {
			errs = append(errs, fmt.Errorf("%s: %s", s.Name, s.Error))
			continue
		}
		for _, c := range s.Missed() {
			errs = append(errs, fmt.Errorf("%s: %s is %.3g, and the bar is %.3g", s.Name, c.What, c.Value, c.Bar))
		}
	}
	return errors.Join(errs...)
}

// The table of a page stands between these lines.
const (
	tableBegin = "<!-- truth table: made by `make truth-docs` from out/truth.json -->"
	tableEnd   = "<!-- end of truth table -->"
)

// Document puts the table into a page of Markdown, in place of the one there.
func (r *Report) Document(page string) (string, error) {
	before, rest, ok := strings.Cut(page, tableBegin)
	_, after, ok2 := strings.Cut(rest, tableEnd)
	if !ok || !ok2 {
		return "", fmt.Errorf("the page has no place for the table: it needs the lines %q and %q", tableBegin, tableEnd)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s%s\n\n%s; %s.\n\n%s. Lost records: %d.\n\n", before, tableBegin,
		r.sources(), r.Size, r.Summary(), r.Lost)
	b.WriteString("| scenario | what is done | stage | added |")
	for _, c := range columns {
		b.WriteString(" " + c.head + " |")
	}
	b.WriteString(" notes |\n|" + strings.Repeat("---|", len(columns)+5) + "\n")
	for _, s := range r.Scenarios {
		what := s.What
		if s.Report != "" {
			what += " (" + s.Report + ")"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %.1f ms |", inCell(s.Name), inCell(what), inCell(s.Stage), 1e3*s.Added)
		for _, c := range columns {
			text := s.cell(c.what)
			if strings.Contains(text, "MISSED") {
				text = "**" + text + "**"
			}
			b.WriteString(" " + text + " |")
		}
		b.WriteString(" " + inCell(s.note()) + " |\n")
	}
	b.WriteString("\nOver all scenarios, but those that are declared invisible:\n\n| stage | injected | recall | named | precision |\n|---|---|---|---|---|\n")
	for _, s := range r.byStage() {
		recall, precision := "–", "–"
		if s.Injected > 0 {
			recall = percent(s.Recall)
		}
		if s.Named > 0 && isStage(s.Stage) {
			precision = percent(s.Precision)
		}
		fmt.Fprintf(&b, "| %s | %d | %s | %d | %s |\n", s.Stage, s.Injected, recall, s.Named, precision)
	}
	b.WriteString("\n" + tableEnd + after)
	return b.String(), nil
}
