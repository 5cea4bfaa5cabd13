package ebpfllmreceiver

import (
	"context"
	"fmt"

	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/consumer"
	"go.opentelemetry.io/collector/receiver"
)

func createTraces(_ context.Context, set receiver.Settings, cfg component.Config, next consumer.Traces) (receiver.Traces, error) {
	c, ok := cfg.(*Config)
	if !ok {
		return nil, fmt.Errorf("ebpfllm cannot use a configuration of type %T", cfg)
	}
	return join(set, c, openProbe, func(in *instance) { in.traces = next }), nil
}

func createMetrics(_ context.Context, set receiver.Settings, cfg component.Config, next consumer.Metrics) (receiver.Metrics, error) {
	c, ok := cfg.(*Config)
	if !ok {
		return nil, fmt.Errorf("ebpfllm cannot use a configuration of type %T", cfg)
	}
	return join(set, c, openProbe, func(in *instance) { in.metrics = next }), nil
}
