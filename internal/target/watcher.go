package target

import (
	"cmp"
	"errors"
	"io/fs"
	"maps"
	"slices"
)

// Change is what the Watcher wants done on the kernel side. Exactly one of its
// fields is set.
type Change struct {
	Track   *Tracked
	Untrack uint32    // pid
	Port    *Listener // a watched process listens on it; told at each look, as the kernel side drops ports
}

// Tracked is a process to watch. Tracking one again replaces what was said of
// it: it executed another program, or the candidate has become a target.
type Tracked struct {
	Process
	Candidate bool // only its request lines may be looked at
}

// Watcher decides which processes are watched. It is told what happens to
// processes, reads the rest from /proc, and returns what changed. It is for one
// goroutine.
type Watcher struct {
	proc    Proc
	rules   []Rule
	self    uint32
	entries map[uint32]*entry
	denied  int

	needPorts bool // to decide: there are no rules, or one names ports
}

type entry struct {
	Tracked
	inherited bool // a child of a target: stays one, whatever it executes
	asked     bool // was asked the path of an LLM API
}

// NewWatcher returns a watcher by the given rules; without rules it watches for
// servers of LLM APIs. The process self is never watched.
func NewWatcher(proc Proc, rules []Rule, self uint32) *Watcher {
	return &Watcher{
		proc: proc, rules: rules, self: self,
		entries: map[uint32]*entry{},
		needPorts: len(rules) == 0 ||
			slices.ContainsFunc(rules, func(r Rule) bool { return len(r.Ports) > 0 }),
	}
}

// Targets returns the number of targets and of candidates.
func (w *Watcher) Targets() (targets, candidates int) {
	for _, e := range w.entries {
		if e.Candidate {
			candidates++
		} else {
			targets++
		}
	}
	return targets, candidates
}

// Denied returns how many readings of processes were refused since the last
// Rescan began.
func (w *Watcher) Denied() int { return w.denied }

// Unmatched returns the indices of the rules that match no process now.
func (w *Watcher) Unmatched() []int {
	var none []int
	ports := w.proc.newPorts()
	for i := range w.rules {
		found := false
		for _, e := range w.entries {
			var listeners []Listener
			if len(w.rules[i].Ports) > 0 {
				listeners, _ = ports.of(e.PID)
			}
			if found = w.rules[i].matches(&e.Process, listeners); found {
				break
			}
		}
		if !found {
			none = append(none, i)
		}
	}
	return none
}

// Process returns a watched process.
func (w *Watcher) Process(pid uint32) (Process, bool) {
	e, ok := w.entries[pid]
	if !ok {
		return Process{}, false
	}
	return e.Process, true
}

// Exec is told that a process executes a new program.
func (w *Watcher) Exec(pid uint32) []Change {
	e := w.entries[pid]
	if e == nil {
		// It listens on nothing yet: not worth looking, every process of the machine
		// comes by here. A socket that was handed to it is found by the next rescan.
		return w.look(pid, nil, true)
	}
	e.asked = false // the old program was
	return w.look(pid, w.proc.newPorts(), true)
}

// Fork is told that a watched process has a child. The kernel side watches the
// child already, by what it knows of the parent.
func (w *Watcher) Fork(pid, parent uint32) {
	e := w.entries[parent]
	if e == nil || pid == w.self {
		return
	}
	child := &entry{Tracked: e.Tracked, inherited: !e.Candidate}
	child.PID, child.ParentPID = pid, parent
	_, start, err := w.proc.stat(pid)
	if err != nil {
		return // it has ended
	}
	child.StartTime = start
	w.entries[pid] = child
}

// Exit is told that a process has ended.
func (w *Watcher) Exit(pid uint32) []Change {
	if w.entries[pid] == nil {
		return nil
	}
	delete(w.entries, pid)
	return []Change{{Untrack: pid}}
}

// Listen is told that a process listens on a TCP port.
func (w *Watcher) Listen(pid uint32) []Change { return w.look(pid, w.proc.newPorts(), false) }

// Asked is told that a candidate was asked the path of an LLM API.
func (w *Watcher) Asked(pid uint32) []Change {
	e := w.entries[pid]
	if e == nil || !e.Candidate {
		return nil
	}
	e.asked = true
	return w.look(pid, w.proc.newPorts(), false)
}

// Served is told that a process served a request, so that it is found if its
// fork or exec was missed.
func (w *Watcher) Served(pid uint32) []Change {
	if w.entries[pid] != nil {
		return nil
	}
	return w.look(pid, w.proc.newPorts(), false)
}

// Rescan reads all processes: those that were there before the watcher, and
// what events were missed. It tells every port that watched processes listen on.
func (w *Watcher) Rescan() ([]Change, error) {
	pids, err := w.proc.PIDs()
	if err != nil {
		return nil, err
	}
	slices.Sort(pids)
	var changes []Change
	for _, pid := range slices.Sorted(maps.Keys(w.entries)) {
		if _, found := slices.BinarySearch(pids, pid); !found {
			changes = append(changes, w.Exit(pid)...)
		}
	}
	w.denied = 0
	ports := w.proc.newPorts()
	for _, p := range w.family(pids) {
		more, _ := w.consider(p.PID, ports, false)
		changes = append(changes, more...)
	}
	return changes, nil
}

// look considers one process and, if it has become a target, its descendants.
func (w *Watcher) look(pid uint32, ports *ports, exec bool) []Change {
	changes, became := w.consider(pid, ports, exec)
	if !became {
		return changes
	}
	pids, err := w.proc.PIDs()
	if err != nil {
		return changes // the next rescan finds them
	}
	tree := map[uint32]bool{pid: true}
	for _, p := range w.family(pids) {
		if tree[p.ParentPID] && p.PID != pid {
			tree[p.PID] = true
			more, _ := w.consider(p.PID, ports, false)
			changes = append(changes, more...)
		}
	}
	return changes
}

// family returns the pids with their parents, parents before their children.
func (w *Watcher) family(pids []uint32) []Process {
	all := make([]Process, 0, len(pids))
	for _, pid := range pids {
		if parent, start, err := w.proc.stat(pid); err == nil {
			all = append(all, Process{PID: pid, ParentPID: parent, StartTime: start})
		}
	}
	slices.SortFunc(all, func(a, b Process) int {
		return cmp.Or(cmp.Compare(a.StartTime, b.StartTime), cmp.Compare(a.PID, b.PID))
	})
	return all
}

// consider decides about one process and tells whether it has just become a
// target. Without ports it is taken to listen on none. With exec its program is
// another one, of which the kernel side knows nothing yet.
func (w *Watcher) consider(pid uint32, ports *ports, exec bool) (changes []Change, became bool) {
	if pid == w.self {
		return nil, false
	}
	p, err := w.proc.Process(pid)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return w.Exit(pid), false
		}
		w.denied++
		return nil, false
	}
	old := w.entries[pid]
	if old != nil && old.StartTime != p.StartTime {
		changes = w.Exit(pid) // the pid was given out again
		old = nil
	}
	if old != nil && p.Path == "" && w.proc.Leaderless(pid) {
		return changes, false // it is what it was, as far as can be seen
	}
	if p.Path == "" { // a kernel thread, or a process that has ended
		return append(changes, w.Exit(pid)...), false
	}

	next := &entry{Tracked: Tracked{Process: p}}
	if old != nil {
		next.inherited, next.asked = old.inherited, old.asked
		exec = exec || old.Path != p.Path
	}
	// What lost its parent is init's child: init hands nothing down.
	if parent := w.entries[p.ParentPID]; parent != nil && !parent.Candidate && p.ParentPID != 1 {
		next.inherited = true
	}
	watch := next.inherited || next.asked
	var listeners []Listener
	if ports != nil && (watch || w.needPorts) {
		if listeners, err = ports.of(pid); err != nil && !errors.Is(err, fs.ErrNotExist) {
			w.denied++
		}
	}
	for i := range w.rules {
		watch = watch || w.rules[i].matches(&p, listeners)
	}
	if !watch && len(w.rules) == 0 && len(listeners) > 0 {
		watch, next.Candidate = true, true
	}
	if !watch {
		return append(changes, w.Exit(pid)...), false
	}

	became = !next.Candidate && (old == nil || old.Candidate)
	if old == nil || exec {
		w.proc.Identify(&next.Process)
	} else {
		next.Identity = old.Identity
	}
	w.entries[pid] = next
	if old == nil || old.Candidate != next.Candidate || old.Go != next.Go || exec && next.Go.IsGo {
		tracked := next.Tracked
		changes = append(changes, Change{Track: &tracked})
	}
	if ports != nil && len(listeners) == 0 && !w.needPorts {
		listeners, _ = ports.of(pid)
	}
	for _, l := range listeners {
		if !ports.told[l] {
			ports.told[l] = true
			changes = append(changes, Change{Port: &l})
		}
	}
	return changes, became
}
