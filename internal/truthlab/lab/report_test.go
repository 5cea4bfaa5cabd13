package lab

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// handmade is a report with a scenario of each fate.
func handmade() *Report {
	r := NewReport(Quick)
	good := &Result{
		Name: "host/lock/threads", Server: "threads", Stage: "lock", Class: ClassThread, What: "a mutex",
		Affected: 100, Right: 99, Unaffected: 500, Named: map[string]int{"lock": 99, "run_queue": 1}, Added: 0.040, LatencyErrorP50: 0.02,
	}
	bad := &Result{
		Name: "host/reclaim/threads", Server: "threads", Stage: "reclaim", Class: ClassThread, What: "memory", Report: "owner/name#1",
		Affected: 100, Right: 90, Unaffected: 500, FalseBlame: 10, FalseNamed: map[string]int{"reclaim": 10}, Missing: 2,
		Named: map[string]int{"reclaim": 90, "page_fault": 8, noSpan: 2}, LatencyErrorP50: 0.3, Lost: 3,
	}
	invisible := &Result{
		Name: "host/user_lock/threads", Stage: "lock", Class: ClassThread, What: "a spinlock", Invisible: "no system call",
		Affected: 100, Unaffected: 500, Named: map[string]int{"cpu": 100},
	}
	control := &Result{
		Name: "host/cpu/threads", Stage: "cpu", Class: ClassControl, Control: true, What: "computes",
		Affected: 100, Right: 100, Unaffected: 500, Named: map[string]int{"cpu": 100},
	}
	skipped := &Result{Name: "host/tbf/threads", Stage: "qdisc", Class: ClassSocket, What: "a shaper", Skipped: "needs tc"}
	for _, s := range []*Result{good, bad, invisible, control, skipped} {
		r.Add(s)
	}
	return r
}

func TestTheReportHasTheFieldsThatOthersRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "truth.json")
	require.NoError(t, handmade().Save(path))
	read, err := ReadReport(path)
	require.NoError(t, err)
	assert.Equal(t, handmade().Scenarios, read.Scenarios)

	b, err := json.Marshal(read)
	require.NoError(t, err)
	var raw struct {
		Scenarios []map[string]any `json:"scenarios"`
		Lost      float64          `json:"lost_records"`
	}
	require.NoError(t, json.Unmarshal(b, &raw))
	assert.InDelta(t, 3, raw.Lost, 0)
	require.Len(t, raw.Scenarios, 5)
	for _, s := range raw.Scenarios {
		for _, field := range []string{"name", "server", "stage", "control", "affected", "right", "false_blame", "unaffected", "latency_error_p50", "latency_error_p95", "unattributed_share"} {
			assert.Contains(t, s, field)
		}
	}
	assert.Equal(t, "reclaim", raw.Scenarios[1]["stage"])
	assert.InDelta(t, 90, raw.Scenarios[1]["right"], 0)
	assert.Equal(t, true, raw.Scenarios[3]["control"])
}

func TestADamagedReportIsRefused(t *testing.T) {
	for content, want := range map[string]string{
		"{}": "no whole report", "null": "no whole report", `{"scenarios":[null],"time":"2026-01-02T03:04:05Z"}`: "no whole report",
		`{"scenarios":[]}`: "no whole report", "nonsense": "no report",
	} {
		path := filepath.Join(t.TempDir(), "truth.json")
		require.NoError(t, WriteWhole(path, []byte(content)))
		_, err := ReadReport(path)
		assert.ErrorContains(t, err, want, content)
	}
}

func TestThePageSaysWhereAndWhenEachPartWasMeasured(t *testing.T) {
	r := handmade()
	at := time.Date(2026, 1, 2, 3, 4, 0, 0, time.UTC)
	for i, s := range r.Scenarios {
		s.Machine, s.Time = "here", at.Add(time.Duration(i)*time.Hour)
	}
	assert.Equal(t, "2026-01-02 03:04 UTC to 2026-01-02 07:04 UTC, on here", r.sources())
	r.Scenarios[4].Machine = "there"
	assert.Equal(t, "2026-01-02 03:04 UTC to 2026-01-02 06:04 UTC, on here (4 scenarios); 2026-01-02 07:04 UTC to 2026-01-02 07:04 UTC, on there (1 scenarios)", r.sources())
}

func TestNoTextBreaksTheTable(t *testing.T) {
	r := handmade()
	r.Scenarios[0].Name, r.Scenarios[0].Error = "a\nb|c", "one\ntwo"
	filled, err := r.Document(tableBegin + "\n" + tableEnd)
	require.NoError(t, err)
	assert.Contains(t, filled, "| a b\\|c |")
	assert.Contains(t, filled, "ERROR: one two")
}

func TestWhatOthersLeftInTheReportIsNotDropped(t *testing.T) {
	r := handmade()
	assert.True(t, r.HasOthers([]Scenario{{Name: "host/lock/threads"}}))
	var all []Scenario
	for _, s := range r.Scenarios {
		all = append(all, Scenario{Name: s.Name})
	}
	assert.False(t, r.HasOthers(all))
}

func TestAScenarioThatIsRunAgainReplacesItsResult(t *testing.T) {
	r := handmade()
	again := *r.Scenarios[1]
	again.Lost = 1
	r.Add(&again)
	assert.Len(t, r.Scenarios, 5)
	assert.EqualValues(t, 1, r.Lost)
	assert.Same(t, &again, r.Scenarios[1])
}

func TestTheTableSaysWhichBarIsMissedAndByHowMuch(t *testing.T) {
	var b bytes.Buffer
	r := handmade()
	require.NoError(t, r.Write(&b))
	lines := strings.Split(b.String(), "\n")
	assert.NotContains(t, lines[1], "MISSED")
	assert.Contains(t, lines[1], "99/100")
	assert.Contains(t, lines[1], "1 named run_queue")
	for _, want := range []string{"90/100 MISSED by 5.0", "10/500 MISSED by 1.0", "30.0% MISSED by 20.0", "3 MISSED", "8 named page_fault", "2 named missing", "10 unaffected blamed on reclaim", "2 requests without a span"} {
		assert.Contains(t, lines[2], want)
	}
	assert.Contains(t, lines[3], "invisible: no system call")
	assert.Contains(t, lines[3], "(0/100)")
	assert.NotContains(t, lines[3], "MISSED")
	assert.Contains(t, strings.Join(strings.Fields(lines[4]), " "), "100/100 0/100", "right, and blamed")
	assert.Contains(t, lines[5], "skipped: needs tc")
	assert.Contains(t, b.String(), "5 scenarios: 2 hold every bar, 1 miss one, 0 could not be run to their end, 1 declared invisible, 1 skipped")

	err := r.Err()
	require.Error(t, err)
	assert.Contains(t, err.Error(), "host/reclaim/threads: right is 0.9, and the bar is 0.95")
	assert.NotContains(t, err.Error(), "user_lock")
	assert.NotContains(t, err.Error(), "tbf")

	r.Scenarios = r.Scenarios[:1]
	require.NoError(t, r.Err())
	r.Scenarios[0].Error = "it broke"
	require.EqualError(t, r.Err(), "host/lock/threads: it broke")
}

func TestRecallAndPrecisionAreOverAllScenarios(t *testing.T) {
	r := handmade()
	r.Scenarios = append(r.Scenarios, &Result{Stage: "page_fault", Affected: 12, Right: 12, Also: []string{"reclaim"}, Named: map[string]int{"page_fault": 10, "reclaim": 2}})
	by := map[string]ByStage{}
	for _, b := range r.byStage() {
		by[b.Stage] = b
	}
	assert.Equal(t, ByStage{"lock", 100, 99, 99, 99, 0.99, 1}, by["lock"], "the invisible one is not in it")
	assert.Equal(t, ByStage{"reclaim", 100, 90, 102, 92, 0.9, 92.0 / 102}, by["reclaim"])
	assert.Equal(t, ByStage{"page_fault", 12, 12, 18, 10, 1, 10.0 / 18}, by["page_fault"])
	assert.Equal(t, ByStage{"run_queue", 0, 0, 1, 0, 0, 0}, by["run_queue"])
	assert.Equal(t, 2, by[noSpan].Named)
	assert.Equal(t, ByStage{"cpu", 100, 100, 100, 100, 1, 1}, by["cpu"])
}

func TestThePageGetsTheTableInPlaceOfTheOldOne(t *testing.T) {
	r := handmade()
	page := "# Accuracy\n\n" + tableBegin + "\nstale\n" + tableEnd + "\n\nrest\n"
	filled, err := r.Document(page)
	require.NoError(t, err)
	assert.True(t, strings.HasPrefix(filled, "# Accuracy\n\n"+tableBegin))
	assert.True(t, strings.HasSuffix(filled, tableEnd+"\n\nrest\n"))
	assert.NotContains(t, filled, "stale")
	assert.Contains(t, filled, "**90/100 MISSED by 5.0**")
	assert.Contains(t, filled, "memory (owner/name#1)")
	again, err := r.Document(filled)
	require.NoError(t, err)
	assert.Equal(t, filled, again)
	_, err = r.Document("no place")
	require.ErrorContains(t, err, "no place for the table")
}

func TestTheConfusionMatrixCountsInjectedByNamed(t *testing.T) {
	r := handmade()
	assert.Equal(t, map[string]map[string]int{
		"lock":    {"lock": 99, "run_queue": 1}, // without those that are declared invisible
		"reclaim": {"reclaim": 90, "page_fault": 8, noSpan: 2},
		"cpu":     {"cpu": 100},
	}, r.Confusion())
	r.Machine = "a <machine> & co"
	var b bytes.Buffer
	require.NoError(t, r.Draw(&b))
	texts := map[string]int{}
	d := xml.NewDecoder(&b)
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err, "well-formed")
		if text, ok := token.(xml.CharData); ok {
			texts[string(text)]++
		}
	}
	assert.Equal(t, 1, texts["lock named lock: 99 of 100"])
	assert.Equal(t, 1, texts["reclaim named page_fault: 8 of 100"])
	assert.Equal(t, 1, texts["reclaim (100)"])
	assert.Equal(t, 1, texts["99"])
}

func TestStagesAreSortedAsTheProjectListsThem(t *testing.T) {
	assert.Negative(t, stageOrder("cpu", "lock"))
	assert.Negative(t, stageOrder("unattributed", "brand_new"))
	assert.Negative(t, stageOrder("brand_new", noSpan))
	assert.Zero(t, stageOrder("lock", "lock"))
}

func TestWhatIsAcceptedIsPaintedAsRight(t *testing.T) {
	r := &Report{Scenarios: []*Result{
		{Stage: "page_fault", Also: []string{"reclaim"}, Named: map[string]int{"page_fault": 3, "reclaim": 2, "cpu": 1}},
		{Stage: "page_fault", Named: map[string]int{"reclaim": 4}},
	}}
	assert.Equal(t, map[string]map[string]int{"page_fault": {"page_fault": 3, "reclaim": 2}}, r.accepted(), "right in one scenario, wrong in the other")
	var b bytes.Buffer
	require.NoError(t, r.Draw(&b))
	for named, hue := range map[string]string{"page_fault": "hsl(140,", "reclaim": "hsl(60,", "cpu": "hsl(4,"} {
		cell, _, found := strings.Cut(b.String(), "page_fault named "+named+":")
		require.True(t, found)
		assert.True(t, strings.HasPrefix(cell[strings.LastIndex(cell, "fill=")+len(`fill="`):], hue), named)
	}
}
