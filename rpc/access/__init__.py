"""Who may call: tokens and their tenants, certificates, and what each rpc asks for."""
