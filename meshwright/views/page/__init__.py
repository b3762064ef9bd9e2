"""A plan as one HTML file that needs nothing else: ``data`` is what it shows, ``document`` the file, ``assets`` draws it."""
