package lab

// Cell is a figure of the table beside the bar that it is held to.
type Cell struct {
	What   string  `json:"what"`
	Value  float64 `json:"value"`
	Bar    float64 `json:"bar"`
	AtMost bool    `json:"at_most"` // the bar is an upper one
	Missed float64 `json:"missed"`  // by how much; 0 if it is held
}

// The bars, as fractions.
const (
	barSocket       = 0.98 // top stage right, whatever the server
	barThread       = 0.95 // on thread-per-request and event-loop servers
	barGo           = 0.85
	barControl      = 0.01 // of a control's requests blamed on a stall, beyond the paired run
	barFalseBlame   = 0.01 // of the unaffected requests, beyond the paired run
	barErrorP50     = 0.10
	barErrorP95     = 0.25
	barUnattributed = 0.10
	barOver         = 0.10 // of the added time claimed by stalls beyond it
	barUnseen       = 0.01 // of the requests without a span that is whole, of either sort
)

// Cells are the result's figures with their bars. A scenario that is invisible, or
// was skipped, is held to none.
func (r *Result) Cells() []Cell {
	if r.Skipped != "" || r.Invisible != "" {
		return nil
	}
	var cells []Cell
	atLeast := func(what string, value, bar float64) {
		cells = append(cells, Cell{What: what, Value: value, Bar: bar, Missed: max(0, bar-value)})
	}
	atMost := func(what string, value, bar float64) {
		cells = append(cells, Cell{What: what, Value: value, Bar: bar, AtMost: true, Missed: max(0, value-bar)})
	}
	switch r.Class {
	case ClassControl:
		atLeast(cellRight, r.Recall(), barThread)
		atMost(cellBlamed, max(0, share(r.Blamed, r.Affected)-r.PairedBlamed), barControl)
	case ClassSocket:
		atLeast(cellRight, r.Recall(), barSocket)
	case ClassGo:
		atLeast(cellRight, r.Recall(), barGo)
	default:
		atLeast(cellRight, r.Recall(), barThread)
	}
	atMost(cellFalse, share(r.FalseBlame, r.Unaffected), barFalseBlame)
	if r.Class != ClassControl || r.Evidence != "" {
		atMost(cellP50, r.LatencyErrorP50, barErrorP50)
		atMost(cellP95, r.LatencyErrorP95, barErrorP95)
		if r.Stage != "wait" && r.Stage != "unattributed" && r.Evidence == "" {
			atMost(cellLeft, r.UnattributedShare, barUnattributed)
		}
	}
	if r.SharedOf > 0 {
		atLeast(cellShared, share(r.SharedRight, r.SharedOf), barThread)
	}
	// an affected request without a span is wrong already
	atMost(cellUnseen, max(share(r.Unseen, r.Unaffected), share(r.Partial, r.Affected)), barUnseen)
	atMost(cellOver, r.Over, barOver)
	atMost(cellLost, float64(r.Lost), 0)
	return cells
}

// The columns of the table.
const (
	cellRight  = "right"
	cellBlamed = "blamed"
	cellFalse  = "false blame"
	cellP50    = "error p50"
	cellP95    = "error p95"
	cellLeft   = "wait+unattributed"
	cellOver   = "claimed beyond"
	cellShared = "shared"
	cellUnseen = "without a whole span"
	cellLost   = "lost"
)

// Missed are the cells that miss their bar.
func (r *Result) Missed() (missed []Cell) {
	for _, c := range r.Cells() {
		if c.Missed > 1e-9 {
			missed = append(missed, c)
		}
	}
	return missed
}

// Failed tells whether the result is a reason to fail: it misses a bar, or could not
// be had.
func (r *Result) Failed() bool { return r.Error != "" || len(r.Missed()) > 0 }
